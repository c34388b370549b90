// Attention of a step's queries over a pool of keys and values, each query seeing its sequence and its tree path.
//
// A query's keys are one list ordered by position, whether a key is committed or an ancestor in the tree. The list is cut
// into blocks of KEY_BLOCK positions, always at multiples of it; blocks are folded into a running softmax (Milakov and
// Gimelshein, arXiv 1805.02867), and every SPAN positions give one partial result, merged in order of position. Within a
// block a score is one chain over the head's dimension and an output one chain over positions. So a query's result has
// the same bits whatever is computed beside it, on however many threads, and whether its context was committed long ago
// or is part of the same tree.
//
// Where the processor multiplies pairs of bfloat16 values, the chains of bfloat16 tensors go by pairs: of dimensions for a
// score, of an even position and its successor for an output. The weights of the values are then rounded to bfloat16, as
// they are in the attention of torch and of Hugging Face models.
#pragma once

#include <atomic>

#include "gemm.h"
#include "plan.h"

constexpr int64_t KEY_BLOCK = 64;
constexpr int64_t SPAN = 4 * KEY_BLOCK;
constexpr int64_t ROWS_AT_ONCE = 48;  // query rows that share a widened key block

// The tensors of one call; strides count elements, the last dimension is contiguous. Mirrored in kernels.py.
struct Attention {
    const void* query;  // [tokens, heads, key_dim]
    int64_t query_token, query_head;
    void* keys;  // [kv_heads, rows, key_dim]
    int64_t keys_head, keys_row;
    void* values;  // [kv_heads, rows, value_dim]
    int64_t values_head, values_row;
    const void* new_keys;  // [tokens, kv_heads, key_dim] to be stored in the pool first, or null
    int64_t new_keys_token, new_keys_head;
    const void* new_values;
    int64_t new_values_token, new_values_head;
    void* out;  // [tokens, heads, value_dim], heads contiguous
    int64_t out_token;
    int64_t heads, kv_heads, key_dim, value_dim;
    int64_t window;  // a key is visible if its position is above the query's minus window; 0: all are
    float scale;
    float softcap;  // scores are bounded to +-softcap by a tanh; 0: they are not
    int32_t dtype;
};

// bfloat16 in the order of its columns, for use as a panel (weights are stored in pairs instead).
struct plain_bf16 {
    uint16_t bits;
};
LS_INLINE void vload_pair(const plain_bf16* p, vf& low, vf& high) {
    low = vload(reinterpret_cast<const bf16*>(p));
    high = vload(reinterpret_cast<const bf16*>(p) + VL);
}

// What the scores and outputs of elements T are computed from.
template <class T> struct Inner {
    using W = float;
};
#if defined(LS_BF16_PAIRS)
template <> struct Inner<bf16> {
    using W = bf16_pair;
};
#endif

// Memory that is wanted next: fetched little by little while something else is computed.
struct Ahead {
    const char* at;
    int64_t bytes;
};

// out[rows, panels * PANEL] = x[rows, depth] times panels laid out as in gemm.h but `step` apart in k.
template <class W>
static void multiply_small(const typename Operand<W>::X* x, int64_t ldx, int64_t rows, const W* panel,
                           int64_t panel_stride, int64_t panels, int64_t step, int64_t depth, Existing existing,
                           Ahead ahead, float* out, int64_t ldo) {
    static constexpr Tiles<W> tiles;
    const int64_t row_tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
    // enough for one cache line at a time in the narrowest case, and never much beyond the end
    const int64_t ahead_step = std::min<int64_t>(64, ahead.bytes / (row_tiles * depth * panels / 4 + 1) + 1);
    const char* const ahead_end = ahead.at + ahead.bytes;
    auto fetch = [&] {
        const char* from = ahead.at;
        if (ahead.at < ahead_end) ahead.at += depth * ahead_step;
        return from;
    };
    for (int64_t t = 0; t < row_tiles; ++t) {
        const int64_t row = rows * t / row_tiles;
        const int count = int(rows * (t + 1) / row_tiles - row);
        const int wide = panels_at_once<W>(count);
        int64_t p = 0;
        for (; p + wide <= panels; p += wide)
            tiles.wide[count](x + row * ldx, ldx, panel + p * panel_stride, panel_stride, step, depth, existing,
                              fetch(), ahead_step, out + row * ldo + p * PANEL, ldo);
        for (; p < panels; ++p)
            tiles.single[count](x + row * ldx, ldx, panel + p * panel_stride, panel_stride, step, depth, existing,
                                fetch(), ahead_step, out + row * ldo + p * PANEL, ldo);
    }
}

// Widens PANEL rows (given by pointers) of `dim` elements and stores them as one panel [dim, PANEL].
template <class T> static void transpose_panel(const T* const* rows, int64_t dim, float* panel) {
    int64_t d = 0;
#if defined(__AVX2__)
    for (; d + 8 <= dim; d += 8)
        for (int group = 0; group < PANEL; group += 8) {
            __m256 r[8], s[8];
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) r[i] = load8(rows[group + i] + d);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i += 2) {
                s[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
                s[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
            }
#pragma GCC unroll 8
            for (int i = 0; i < 8; i += 4) {
                r[i] = _mm256_shuffle_ps(s[i], s[i + 2], 0x44);
                r[i + 1] = _mm256_shuffle_ps(s[i], s[i + 2], 0xee);
                r[i + 2] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0x44);
                r[i + 3] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0xee);
            }
#pragma GCC unroll 8
            for (int i = 0; i < 4; ++i) {
                _mm256_storeu_ps(panel + (d + i) * PANEL + group, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
                _mm256_storeu_ps(panel + (d + i + 4) * PANEL + group, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
            }
        }
#endif
    for (; d < dim; ++d)
        for (int i = 0; i < PANEL; ++i) panel[d * PANEL + i] = to_float(rows[i][d]);
}

#if defined(LS_BF16_PAIRS)
// The same in pairs: one panel [(dim + 1) / 2, PANEL].
static void transpose_panel(const bf16* const* rows, int64_t dim, bf16_pair* panel) {
    // a pair moves like a float
    transpose_panel(reinterpret_cast<const float* const*>(rows), dim / 2, reinterpret_cast<float*>(panel));
    if (dim % 2)
        for (int i = 0; i < PANEL; ++i) panel[dim / 2 * PANEL + i] = {rows[i][dim - 1].bits};
}
#endif

LS_INLINE int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Where a thread's intermediate results live. Queries, keys, values and weights (the scores' successors in the same
// memory) may be pairs instead.
struct AttentionBuffers {
    float *query, *scores, *keys, *values, *sum, *total, *tail_keys, *tail_scores;
    float *sum_max, *sum_weight, *total_max, *total_weight;

    static int64_t size(int64_t rows, int64_t group, int64_t key_dim, int64_t value_dim) {
        AttentionBuffers unused;
        return unused.lay_out(nullptr, rows, group, key_dim, value_dim);
    }

    // Returns the number of floats needed.
    int64_t lay_out(float* at, int64_t rows, int64_t group, int64_t key_dim, int64_t value_dim) {
        const int64_t padded = round_up(value_dim, PANEL);
        float* const begin = at;
        auto take = [&](float*& part, int64_t count) {
            part = at;
            at += round_up(count, 16);
        };
        take(query, rows * key_dim);
        take(scores, rows * KEY_BLOCK);
        take(keys, KEY_BLOCK * key_dim);
        take(values, KEY_BLOCK * padded);
        take(sum, rows * padded);
        take(total, rows * padded);
        take(tail_keys, PANEL * key_dim);
        take(tail_scores, group * PANEL);
        for (float** part : {&sum_max, &sum_weight, &total_max, &total_weight}) take(*part, rows);
        return at - begin;
    }
};

// The queries of some consecutive nodes of one sequence, all heads that share one key-value head.
template <class T> class QueryTile {
    using W = typename Inner<T>::W;
    using X = typename Operand<W>::X;
    using V = typename Operand<W>::V;
    static constexpr int PER = Operand<W>::PER;

   public:
    QueryTile(const Attention& call, const Step& step, const AttentionBuffers& buffers, int64_t sequence,
              int64_t kv_head, int64_t node, int64_t nodes)
        : call_(call),
          step_(step),
          b_(buffers),
          first_(step.first[sequence] + node),
          nodes_(nodes),
          group_(call.heads / call.kv_heads),
          rows_(nodes * group_),
          head_(kv_head * group_),
          length_(step.lengths[sequence]),
          padded_(round_up(call.value_dim, PANEL)),
          depth_((call.key_dim + PER - 1) / PER),
          query_(reinterpret_cast<X*>(buffers.query)),
          weights_(reinterpret_cast<X*>(buffers.scores)),
          keys_(static_cast<const T*>(call.keys) + kv_head * call.keys_head + step.starts[sequence] * call.keys_row),
          values_(static_cast<const T*>(call.values) + kv_head * call.values_head +
                  step.starts[sequence] * call.values_row) {
        first_key_ = INT64_MAX;
        end_key_ = end_trunk_ = 0;
        for (int64_t i = 0; i < nodes; ++i) {
            first_key_ = std::min(first_key_, low(i));
            end_key_ = std::max(end_key_, high(i));
            end_trunk_ = std::max(end_trunk_, trunk(i));
        }
    }

    int64_t first_span() const { return first_key_ / SPAN; }
    int64_t end_span() const { return (end_key_ + SPAN - 1) / SPAN; }

    // Folds the keys of one span into sum, sum_max and sum_weight.
    void compute_span(int64_t span) {
        for (int64_t r = 0; r < rows_; ++r) {
            b_.sum_max[r] = -INFINITY;
            b_.sum_weight[r] = 0;
        }
        memset(b_.sum, 0, size_t(rows_ * padded_) * sizeof(float));
        for (int64_t begin = span * SPAN; begin < std::min((span + 1) * SPAN, end_key_); begin += KEY_BLOCK)
            if (begin + KEY_BLOCK > first_key_) fold_block(begin);
    }

    // `query` is the call's.
    template <class Q> void load_queries(const Q* query) {
        for (int64_t r = 0; r < rows_; ++r)
            load_query(query + (first_ + r / group_) * call_.query_token + (head_ + r % group_) * call_.query_head,
                       query_ + r * depth_);
    }

    void begin_total() {
        for (int64_t r = 0; r < rows_; ++r) {
            b_.total_max[r] = -INFINITY;
            b_.total_weight[r] = 0;
        }
        memset(b_.total, 0, size_t(rows_ * padded_) * sizeof(float));
    }

    // Merges the partial result of the next span (its rows of padded value dimension, maxima and weights).
    void merge(const float* sum, const float* max, const float* weight) {
        for (int64_t r = 0; r < rows_; ++r) {
            if (max[r] == -INFINITY) continue;  // none of the span's keys is visible
            const float top = std::max(b_.total_max[r], max[r]);
            float factor[VL];
            vstore(factor, vexp(vset(b_.total_max[r] - top)));
            const float keep = factor[0];
            vstore(factor, vexp(vset(max[r] - top)));
            const float add = factor[0];
            b_.total_max[r] = top;
            b_.total_weight[r] = __builtin_fmaf(b_.total_weight[r], keep, weight[r] * add);
            float* total = b_.total + r * padded_;
            for (int64_t c = 0; c < padded_; c += VL)
                vstore(total + c, vfma(vload(total + c), vset(keep), vmul(vload(sum + r * padded_ + c), vset(add))));
        }
    }

    // `out` is the call's.
    template <class O> void store(O* out) const {
        for (int64_t r = 0; r < rows_; ++r) {
            O* to = out + (first_ + r / group_) * call_.out_token + (head_ + r % group_) * call_.value_dim;
            const float* total = b_.total + r * padded_;
            const vf weight = vset(b_.total_weight[r]);
            for (int64_t c = 0; c < call_.value_dim; c += PANEL)
                store_panel(to, c, call_.value_dim, vround_to<T>(vdiv(vload(total + c), weight)),
                            vround_to<T>(vdiv(vload(total + c + VL), weight)));
        }
    }

    int64_t rows() const { return rows_; }
    const AttentionBuffers& buffers() const { return b_; }

   private:
    template <class Q> void load_query(const Q* from, float* to) const {
        int64_t d = 0;
        for (; d + VL <= call_.key_dim; d += VL) vstore(to + d, vmul(vload(from + d), vset(call_.scale)));
        for (; d < call_.key_dim; ++d) to[d] = to_float(from[d]) * call_.scale;
    }

    // Pairs cannot hold the query times the scale, so that the scores are scaled instead.
    template <class Q> void load_query(const Q* from, bf16_pair* pairs) const {
        bf16* to = reinterpret_cast<bf16*>(pairs);
        int64_t d = 0;
        for (; d + VL <= call_.key_dim; d += VL) vstore(to + d, vload(from + d));
        for (; d < PER * depth_; ++d) to[d] = d < call_.key_dim ? to_bf16(to_float(from[d])) : bf16{};
    }

    // Visible positions of node i: [low, high), of which those below trunk lie at pool rows of the same number.
    int64_t high(int64_t i) const { return length_ + step_.depth[first_ + i] + 1; }
    int64_t trunk(int64_t i) const { return length_ + step_.trunk[first_ + i]; }
    int64_t low(int64_t i) const { return call_.window ? std::max<int64_t>(0, high(i) - call_.window) : 0; }
    // Pool row, within the sequence, of the key at `position` as node i sees it.
    int64_t row_of(int64_t i, int64_t position) const {
        return position < trunk(i) ? position : length_ + step_.nodes[step_.tail[first_ + i] + position - trunk(i)];
    }

    void fold_block(int64_t begin) {
        const int64_t end = begin + KEY_BLOCK;
        const int64_t shared_end = std::min(end, end_trunk_);  // keys at rows of the same number, for some query
        if (shared_end > begin) score_shared(begin, shared_end);
        // Positions that every query sees, and sees at the same rows, are multiplied with the values together.
        int64_t common_begin = begin, common_end = end;
        for (int64_t i = 0; i < nodes_; ++i) {
            if (trunk(i) < std::min(high(i), end)) score_tail(i, begin, end);
            common_begin = std::max(common_begin, std::min(low(i), end));
            common_end = std::min(common_end, trunk(i));
            for (int64_t g = 0; g < group_; ++g)
                fold_row(i * group_ + g, std::max(low(i), begin) - begin, std::min(high(i), end) - begin);
        }
        common_begin = round_up(common_begin, PER);
        common_end = common_end / PER * PER;
        if (common_begin >= common_end) common_begin = common_end = end;
        for (int64_t i = 0; i < nodes_; ++i) add_values(i, begin, std::max(low(i), begin), std::min(high(i), common_begin));
        if (common_begin == end) return;
        add_common_values(begin, common_begin, common_end);
        for (int64_t i = 0; i < nodes_; ++i) add_values(i, begin, std::max(low(i), common_end), std::min(high(i), end));
    }

    static Ahead next_block(const T* block, int64_t row) {
        return {reinterpret_cast<const char*>(block + KEY_BLOCK * row), KEY_BLOCK * row * int64_t(sizeof(T))};
    }

    void score_shared(int64_t begin, int64_t end) {
        const T* rows[PANEL];
        const int64_t panels = (end - begin + PANEL - 1) / PANEL;
        W* panel = reinterpret_cast<W*>(b_.keys);
        for (int64_t p = 0; p < panels; ++p) {
            for (int64_t i = 0; i < PANEL; ++i)
                rows[i] = keys_ + std::min(begin + p * PANEL + i, end - 1) * call_.keys_row;
            transpose_panel(rows, call_.key_dim, panel + p * PANEL * depth_);
        }
        multiply_small<W>(query_, depth_, rows_, panel, PANEL * depth_, panels, PANEL, depth_, IGNORE,
                          next_block(keys_ + begin * call_.keys_row, call_.keys_row), b_.scores, KEY_BLOCK);
    }

    void score_tail(int64_t i, int64_t begin, int64_t end) {
        const int64_t last = std::min(high(i), end);
        W* panel = reinterpret_cast<W*>(b_.tail_keys);
        for (int64_t from = std::max(begin, trunk(i)); from < last; from += PANEL) {
            const T* rows[PANEL];
            for (int64_t j = 0; j < PANEL; ++j) rows[j] = keys_ + row_of(i, std::min(from + j, last - 1)) * call_.keys_row;
            transpose_panel(rows, call_.key_dim, panel);
            multiply_small<W>(query_ + i * group_ * depth_, depth_, group_, panel, 0, 1, PANEL, depth_, IGNORE, {},
                              b_.tail_scores, PANEL);
            const int64_t count = std::min<int64_t>(PANEL, last - from);
            for (int64_t g = 0; g < group_; ++g)
                memcpy(b_.scores + (i * group_ + g) * KEY_BLOCK + from - begin, b_.tail_scores + g * PANEL,
                       size_t(count) * sizeof(float));
        }
    }

    using Weight = typename std::conditional<PER == 1, float, T>::type;

    // Turns a row's scores of a block, of which [first, last) are visible, into weights and rescales its sums.
    void fold_row(int64_t row, int64_t first, int64_t last) {
        float* scores = b_.scores + row * KEY_BLOCK;
        if (first >= last) return;
        if (PER > 1)
            for (int64_t j = 0; j < KEY_BLOCK; j += VL) vstore(scores + j, vmul(vload(scores + j), vset(call_.scale)));
        if (call_.softcap > 0) bound_scores(scores);
        for (int64_t j = 0; j < first; ++j) scores[j] = -INFINITY;
        for (int64_t j = last; j < KEY_BLOCK; ++j) scores[j] = -INFINITY;
        vf highest = vload(scores);
#pragma GCC unroll 8
        for (int64_t j = VL; j < KEY_BLOCK; j += VL) highest = vmax(highest, vload(scores + j));
        const float before = b_.sum_max[row], top = std::max(before, vmaximum(highest));
        if (top == -INFINITY) {  // every score overflowed
            memset(scores, 0, KEY_BLOCK * sizeof(float));
            return;
        }
        float keep[VL];
        vstore(keep, vexp(vset(before - top)));
        vf weight = vset(0.0f);
#pragma GCC unroll 8
        for (int64_t j = 0; j < KEY_BLOCK; j += VL) {
            const vf e = vround_to<Weight>(vexp(vsub(vload(scores + j), vset(top))));
            vstore(reinterpret_cast<Weight*>(scores) + j, e);
            weight = vadd(weight, e);
        }
        b_.sum_max[row] = top;
        b_.sum_weight[row] = __builtin_fmaf(b_.sum_weight[row], keep[0], vsum(weight));
        float* sum = b_.sum + row * padded_;
        for (int64_t c = 0; c < padded_; c += VL) vstore(sum + c, vmul(vload(sum + c), vset(keep[0])));
    }

    // cap * tanh(score / cap), as in Gemma 2 (arXiv 2408.00118)
    void bound_scores(float* scores) const {
        const vf cap = vset(call_.softcap), one = vset(1.0f), two = vset(2.0f);
        for (int64_t j = 0; j < KEY_BLOCK; j += VL) {
            const vf e = vexp(vmul(two, vdiv(vload(scores + j), cap)));
            vstore(scores + j, vmul(cap, vsub(one, vdiv(two, vadd(e, one)))));
        }
    }

    // sums of node i += weights times values, over positions [from, to) in order
    void add_values(int64_t i, int64_t begin, int64_t from, int64_t to) {
        if (from >= to) return;
        for (int64_t position = from / PER * PER; position < to; position += PER) {
            const T* values[PER];
            for (int64_t j = position; j < position + PER; ++j)
                values[j - position] = j < from || j >= to ? nullptr : values_ + row_of(i, j) * call_.values_row;
            for (int64_t c = 0; c < call_.value_dim; c += PANEL) {
                V low, high;
                vzip(values, c, call_.value_dim, low, high);
                for (int64_t r = i * group_; r < (i + 1) * group_; ++r) {
                    const V weight = vset(weights_[r * KEY_BLOCK + (position - begin) / PER]);
                    float* sum = b_.sum + r * padded_ + c;
                    vstore(sum, vfma(weight, low, vload(sum)));
                    vstore(sum + VL, vfma(weight, high, vload(sum + VL)));
                }
            }
        }
    }

    // The same for all rows at once, over positions at rows of the same number, pairs not split.
    void add_common_values(int64_t begin, int64_t from, int64_t to) {
        const T* values = values_ + from * call_.values_row;
        const X* weights = weights_ + (from - begin) / PER;
        const Ahead ahead = next_block(values_ + begin * call_.values_row, call_.values_row);
        if constexpr (PER == 1) {
            if (call_.value_dim % PANEL == 0) {  // the pool's rows can be read as panels
                using Panel = typename std::conditional<std::is_same<T, bf16>::value, plain_bf16, T>::type;
                multiply_small(weights, KEY_BLOCK, rows_, reinterpret_cast<const Panel*>(values), PANEL,
                               padded_ / PANEL, call_.values_row, to - from, CONTINUE, ahead, b_.sum, padded_);
                return;
            }
        }
        X* panels = reinterpret_cast<X*>(b_.values);
        const int64_t steps = (to - from) / PER;
        for (int64_t j = 0; j < steps; ++j) {
            const T* rows[PER];
            for (int64_t k = 0; k < PER; ++k) rows[k] = values + (j * PER + k) * call_.values_row;
            for (int64_t c = 0; c < call_.value_dim; c += PANEL) {
                V low, high;
                vzip(rows, c, call_.value_dim, low, high);
                vstore(panels + c * steps + j * PANEL, low);
                vstore(panels + c * steps + j * PANEL + VL, high);
            }
        }
        multiply_small<W>(weights, KEY_BLOCK, rows_, panels, steps * PANEL, padded_ / PANEL, PANEL, steps, CONTINUE,
                          ahead, b_.sum, padded_);
    }

    const Attention& call_;
    const Step& step_;
    AttentionBuffers b_;
    int64_t first_, nodes_, group_, rows_, head_, length_, padded_;
    int64_t depth_;  // steps of the chain of a score
    X* query_;
    X* weights_;
    const T* keys_;
    const T* values_;
    int64_t first_key_, end_key_, end_trunk_;
};

// The work of a call, cut into tiles; with few of them, the spans of a tile are computed apart and merged afterwards.
class AttentionWork {
   public:
    AttentionWork(const Attention& call, const Step& step, int threads)
        : group_(call.heads / call.kv_heads), nodes_(std::max<int64_t>(1, ROWS_AT_ONCE / group_)) {
        for (int64_t s = 0; s < step.sequences; ++s) tiles_ += tiles_of(step.widths[s]) * call.kv_heads;
        split_ = threads > 1 && tiles_ < 4 * threads;
        threads_ = threads;
        if (split_)
            for (int64_t s = 0; s < step.sequences; ++s) {
                const int64_t keys = step.lengths[s] + step.widths[s];
                spans_ = std::max(spans_, (keys + SPAN - 1) / SPAN);
            }
        rows_ = nodes_ * group_;
        padded_ = round_up(call.value_dim, PANEL);
        buffer_ = AttentionBuffers::size(rows_, group_, call.key_dim, call.value_dim);
        partial_ = rows_ * (padded_ + 2);
    }

    // Floats of scratch memory needed: every thread's buffers, and the partial results.
    int64_t scratch() const { return threads_ * buffer_ + (split_ ? tiles_ * spans_ * partial_ : 0); }

    // The call's queries are of type Q and its outputs of type O, values of T in either case.
    template <class T, class Q = T, class O = T>
    void run(const Team& team, const Attention& call, const Step& step, float* scratch,
             std::atomic<int64_t>& next, std::atomic<int64_t>& next_merge) const {
        AttentionBuffers buffers;
        buffers.lay_out(scratch + team.rank * buffer_, rows_, group_, call.key_dim, call.value_dim);
        float* partials = scratch + threads_ * buffer_;
        const int64_t units = tiles_ * spans_;
        for (int64_t unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < units;) {
            QueryTile<T> tile = tile_at<T>(unit / spans_, call, step, buffers);
            tile.load_queries(static_cast<const Q*>(call.query));
            if (!split_) {
                tile.begin_total();
                for (int64_t span = tile.first_span(); span < tile.end_span(); ++span) {
                    tile.compute_span(span);
                    tile.merge(buffers.sum, buffers.sum_max, buffers.sum_weight);
                }
                tile.store(static_cast<O*>(call.out));
                continue;
            }
            const int64_t span = unit % spans_;
            if (span < tile.first_span() || span >= tile.end_span()) continue;
            tile.compute_span(span);
            float* partial = partials + unit * partial_;
            memcpy(partial, buffers.sum, size_t(tile.rows() * padded_) * sizeof(float));
            memcpy(partial + rows_ * padded_, buffers.sum_max, size_t(tile.rows()) * sizeof(float));
            memcpy(partial + rows_ * (padded_ + 1), buffers.sum_weight, size_t(tile.rows()) * sizeof(float));
        }
        if (!split_) return;
        team.barrier();
        for (int64_t unit; (unit = next_merge.fetch_add(1, std::memory_order_relaxed)) < tiles_;) {
            QueryTile<T> tile = tile_at<T>(unit, call, step, buffers);
            tile.begin_total();
            for (int64_t span = tile.first_span(); span < tile.end_span(); ++span) {
                const float* partial = partials + (unit * spans_ + span) * partial_;
                tile.merge(partial, partial + rows_ * padded_, partial + rows_ * (padded_ + 1));
            }
            tile.store(static_cast<O*>(call.out));
        }
    }

   private:
    int64_t tiles_of(int64_t width) const { return (width + nodes_ - 1) / nodes_; }

    template <class T>
    QueryTile<T> tile_at(int64_t tile, const Attention& call, const Step& step, const AttentionBuffers& buffers) const {
        int64_t s = 0;
        while (tile >= tiles_of(step.widths[s]) * call.kv_heads) tile -= tiles_of(step.widths[s++]) * call.kv_heads;
        const int64_t node = tile / call.kv_heads * nodes_;
        return QueryTile<T>(call, step, buffers, s, tile % call.kv_heads, node,
                            std::min(nodes_, step.widths[s] - node));
    }

    int64_t group_, nodes_, rows_, padded_, buffer_, partial_;
    int64_t tiles_ = 0, spans_ = 1;
    int threads_;
    bool split_;
};

// This thread's share of storing the step's keys and values at their rows of the pool.
template <class T> static void store_new(const Team& team, const Attention& call, const Step& step) {
    if (!call.new_keys) return;
    int64_t begin, end;
    team.share(step.tokens, begin, end);
    int64_t s = 0;
    for (int64_t t = begin; t < end; ++t) {
        while (t >= step.first[s] + step.widths[s]) ++s;
        const int64_t row = step.starts[s] + step.lengths[s] + t - step.first[s];
        for (int64_t h = 0; h < call.kv_heads; ++h) {
            memcpy(static_cast<T*>(call.keys) + h * call.keys_head + row * call.keys_row,
                   static_cast<const T*>(call.new_keys) + t * call.new_keys_token + h * call.new_keys_head,
                   size_t(call.key_dim) * sizeof(T));
            memcpy(static_cast<T*>(call.values) + h * call.values_head + row * call.values_row,
                   static_cast<const T*>(call.new_values) + t * call.new_values_token + h * call.new_values_head,
                   size_t(call.value_dim) * sizeof(T));
        }
    }
}

static thread_local Scratch attention_scratch;

template <class T> static void attention(const Attention& call, const Step& step, int threads) {
    const AttentionWork work(call, step, threads);
    float* scratch = static_cast<float*>(attention_scratch.reserve(size_t(work.scratch()) * sizeof(float)));
    std::atomic<int64_t> next{0}, next_merge{0};
    parallel(threads, [&](Team team) {
        if (call.new_keys) {
            store_new<T>(team, call, step);
            team.barrier();
        }
        work.run<T>(team, call, step, scratch, next, next_merge);
    });
}
