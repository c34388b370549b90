// A whole decoder layer in one call: norms, projections, rotary embedding, attention over the pool, gated MLP.
//
// Intermediate results are kept in float32 but rounded to the model's element type wherever the unfused model rounds:
// after every projection, norm, product and sum that it computes as an operation of its own.
#pragma once

#include "attention.h"

// Root mean square norm (Zhang and Sennrich, arXiv 1910.07467) over rows of n values.
struct Norm {
    const float* weight;  // what the normalised values are multiplied by; null: no norm here
    float eps;
    int32_t late;  // round once, after the multiplication; else the normalised values are rounded before it as well
};

enum Activation : int32_t { SILU = 0, GELU_TANH = 1 };

// One decoder layer: x += post(attention(input(x))); x += mlp_post(mlp(mlp_input(x))). Mirrored in kernels.py.
struct Layer {
    int64_t hidden, intermediate, heads, kv_heads, key_dim, value_dim;
    int64_t window;
    float scale, softcap;
    int32_t dtype;
    int32_t activation;
    PackedWeight qkv;      // panels of the queries, of the keys, of the values; each from a new panel on
    PackedWeight out;      // attention's output projection
    PackedWeight gate_up;  // panels of gate and up alternate
    PackedWeight down;
    Norm input, query, key, attention_post, mlp_input, mlp_post;
};

// What changes from call to call.
struct LayerCall {
    const void* x;  // [tokens, hidden]
    void* y;        // [tokens, hidden], may be x
    const void *cosines, *sines;  // [tokens, key_dim] of the rotary embedding
    void *keys, *values;          // the layer's pools, as in struct Attention
    int64_t keys_head, keys_row, values_head, values_row;
};

template <class T, class A>
static void norm_row(const Norm& norm, const float* x, int64_t n, A* y) {
    vf part[4] = {vset(0.0f), vset(0.0f), vset(0.0f), vset(0.0f)};
    int64_t i = 0;
    for (; i + 4 * VL <= n; i += 4 * VL)
        for (int j = 0; j < 4; ++j) {
            const vf v = vload(x + i + j * VL);
            part[j] = vfma(v, v, part[j]);
        }
    float squares = vsum(vadd(vadd(part[0], part[1]), vadd(part[2], part[3])));
    for (; i < n; ++i) squares = __builtin_fmaf(x[i], x[i], squares);
    const float factor = 1.0f / std::sqrt(squares / float(n) + norm.eps);
    const vf factors = vset(factor);
    for (i = 0; i + VL <= n; i += VL) {
        const vf scaled = vmul(vload(x + i), factors);
        vstore(y + i, vround_to<T>(vmul(vload(norm.weight + i), norm.late ? scaled : vround_to<T>(scaled))));
    }
    for (; i < n; ++i) {
        const float scaled = x[i] * factor;
        store_one(y + i, round_to<T>(norm.weight[i] * (norm.late ? scaled : round_to<T>(scaled))));
    }
}

// Rotates the pairs (c, c + dim/2) of a head (Su et al., arXiv 2104.09864), in place.
template <class T> static void rotate(float* head, const T* cosines, const T* sines, int64_t dim) {
    const int64_t half = dim / 2;
    int64_t c = 0;
    for (; c + VL <= half; c += VL) {
        const vf low = vload(head + c), high = vload(head + half + c), zero = vset(0.0f);
        const vf a = vround_to<T>(vmul(low, vload(cosines + c)));
        const vf b = vround_to<T>(vmul(vsub(zero, high), vload(sines + c)));
        const vf d = vround_to<T>(vmul(high, vload(cosines + half + c)));
        const vf e = vround_to<T>(vmul(low, vload(sines + half + c)));
        vstore(head + c, vround_to<T>(vadd(a, b)));
        vstore(head + half + c, vround_to<T>(vadd(d, e)));
    }
    for (; c < half; ++c) {
        const float low = head[c], high = head[half + c];
        head[c] = round_to<T>(round_to<T>(low * to_float(cosines[c])) + round_to<T>(-high * to_float(sines[c])));
        head[half + c] = round_to<T>(round_to<T>(high * to_float(cosines[half + c])) +
                                     round_to<T>(low * to_float(sines[half + c])));
    }
}

LS_INLINE vf activate(Activation kind, vf x) {
    const vf one = vset(1.0f);
    if (kind == SILU) return vdiv(x, vadd(one, vexp(vsub(vset(0.0f), x))));
    // 0.5 x (1 + tanh(z)) = x / (1 + exp(-2 z)), z = sqrt(2 / pi) (x + 0.044715 x^3); Hendrycks and Gimpel, arXiv 1606.08415
    const vf cubic = vmul(vset(0.044715f), vmul(x, vmul(x, x)));
    const vf z = vmul(vset(0.7978845608f), vadd(x, cubic));
    return vdiv(x, vadd(one, vexp(vmul(vset(-2.0f), z))));
}

template <class T> class LayerRun {
    using A = Input<T>;

   public:
    LayerRun(const Layer& layer, const LayerCall& call, const Step& step, int threads)
        : layer_(layer), call_(call), step_(step), tokens_(step.tokens), attention_(), work_(describe(), step, threads) {
        ld_hidden_ = padded_stride(layer.hidden);
        ld_qkv_ = layer.qkv.panel_count() * PANEL;
        ld_heads_ = padded_stride(layer.heads * layer.value_dim);
        ld_gated_ = padded_stride(layer.intermediate);
        keys_at_ = round_up(layer.heads * layer.key_dim, PANEL);
        values_at_ = keys_at_ + round_up(layer.kv_heads * layer.key_dim, PANEL);
        float* at = static_cast<float*>(scratch_.reserve(size_t(size()) * sizeof(float)));
        auto take = [&](auto*& part, int64_t ld) {
            part = reinterpret_cast<typename std::remove_reference<decltype(part)>::type>(at);
            at += round_up(tokens_ * ld, 16);
        };
        take(residual_, ld_hidden_);
        take(normed_, ld_hidden_);
        take(projected_, ld_hidden_);
        take(qkv_, ld_qkv_);
        take(attended_, ld_heads_);
        take(gated_, ld_gated_);
        work_scratch_ = at;
        attention_.query = qkv_;
        attention_.query_token = ld_qkv_;
        attention_.out = attended_;
        attention_.out_token = ld_heads_;
    }

    void run(const Team& team) {
        const T* x = static_cast<const T*>(call_.x);
        T* y = static_cast<T*>(call_.y);
        each_row(team, [&](int64_t t) {
            float* row = residual_ + t * ld_hidden_;
            widen_row(x + t * layer_.hidden, layer_.hidden, row);
            norm_row<T>(layer_.input, row, layer_.hidden, normed_ + t * ld_hidden_);
        });
        project(team, normed_, ld_hidden_, layer_.qkv, qkv_, ld_qkv_);
        team.barrier();
        rotate_and_store(team);
        team.barrier();
        work_.template run<T, float, A>(team, attention_, step_, work_scratch_, next_, next_merge_);
        team.barrier();
        add_projection(team, attended_, ld_heads_, layer_.out, layer_.attention_post);
        each_row(team, [&](int64_t t) {
            norm_row<T>(layer_.mlp_input, residual_ + t * ld_hidden_, layer_.hidden, normed_ + t * ld_hidden_);
        });
        gate(team);
        team.barrier();
        add_projection(team, gated_, ld_gated_, layer_.down, layer_.mlp_post);
        each_row(team, [&](int64_t t) {
            narrow_row(residual_ + t * ld_hidden_, layer_.hidden, y + t * layer_.hidden);
        });
    }

   private:
    const Attention& describe() {
        attention_.query_head = layer_.key_dim;
        attention_.keys = call_.keys;
        attention_.keys_head = call_.keys_head;
        attention_.keys_row = call_.keys_row;
        attention_.values = call_.values;
        attention_.values_head = call_.values_head;
        attention_.values_row = call_.values_row;
        attention_.heads = layer_.heads;
        attention_.kv_heads = layer_.kv_heads;
        attention_.key_dim = layer_.key_dim;
        attention_.value_dim = layer_.value_dim;
        attention_.window = layer_.window;
        attention_.scale = layer_.scale;
        attention_.softcap = layer_.softcap;
        attention_.dtype = layer_.dtype;
        return attention_;
    }

    int64_t size() const {
        const int64_t rows = 3 * ld_hidden_ + ld_qkv_ + ld_heads_ + ld_gated_;
        return tokens_ * rows + 6 * 16 + work_.scratch();
    }

    // body(t) for this thread's rows, complete on all threads when it returns.
    template <class Body> void each_row(const Team& team, Body&& body) {
        int64_t begin, end;
        team.share(tokens_, begin, end);
        for (int64_t t = begin; t < end; ++t) body(t);
        team.barrier();
    }

    // out[t] = W x[t] + b for this thread's part of the outputs
    void project(const Team& team, const A* x, int64_t ldx, const PackedWeight& weight, float* out, int64_t ldo) {
        multiply_any<1>(team, x, ldx, tokens_, weight, [&](int64_t t, int64_t panel, const float* results) {
            vf low = vload(results), high = vload(results + VL);
            add_bias(weight, panel, low, high);
            store_panel(out + t * ldo, panel * PANEL, weight.n, vround_to<T>(low), vround_to<T>(high));
        });
    }

    // residual += post(W x); not complete on other threads before the next barrier, unless there is a post norm
    void add_projection(const Team& team, const A* x, int64_t ldx, const PackedWeight& weight, const Norm& post) {
        if (post.weight) {
            project(team, x, ldx, weight, projected_, ld_hidden_);
            team.barrier();
            each_row(team, [&](int64_t t) {
                float *row = projected_ + t * ld_hidden_, *sum = residual_ + t * ld_hidden_;
                norm_row<T>(post, row, layer_.hidden, row);
                int64_t i = 0;
                for (; i + VL <= layer_.hidden; i += VL)
                    vstore(sum + i, vround_to<T>(vadd(vload(sum + i), vload(row + i))));
                for (; i < layer_.hidden; ++i) sum[i] = round_to<T>(sum[i] + row[i]);
            });
            return;
        }
        multiply_any<1>(team, x, ldx, tokens_, weight, [&](int64_t t, int64_t panel, const float* results) {
            vf low = vload(results), high = vload(results + VL);
            add_bias(weight, panel, low, high);
            float* sum = residual_ + t * ld_hidden_;
            float before[PANEL] = {};
            memcpy(before, sum + panel * PANEL, size_t(std::min<int64_t>(PANEL, weight.n - panel * PANEL)) * sizeof(float));
            low = vround_to<T>(vadd(vload(before), vround_to<T>(low)));
            high = vround_to<T>(vadd(vload(before + VL), vround_to<T>(high)));
            store_panel(sum, panel * PANEL, weight.n, low, high);
        });
        team.barrier();
    }

    // Norms and rotates queries and keys, and stores keys and values in the pool.
    void rotate_and_store(const Team& team) {
        const int64_t parts = layer_.heads + 2 * layer_.kv_heads;
        int64_t begin, end;
        team.share(tokens_ * parts, begin, end);
        int64_t s = 0;
        for (int64_t unit = begin; unit < end; ++unit) {
            const int64_t t = unit / parts, part = unit % parts;
            while (t >= step_.first[s] + step_.widths[s]) ++s;
            const int64_t row = step_.starts[s] + step_.lengths[s] + t - step_.first[s];
            float* projected = qkv_ + t * ld_qkv_;
            if (part < layer_.heads) {
                rotate_head(layer_.query, projected + part * layer_.key_dim, t);
            } else if (part < layer_.heads + layer_.kv_heads) {
                const int64_t h = part - layer_.heads;
                float* head = projected + keys_at_ + h * layer_.key_dim;
                rotate_head(layer_.key, head, t);
                narrow_row(head, layer_.key_dim, static_cast<T*>(call_.keys) + h * call_.keys_head + row * call_.keys_row);
            } else {
                const int64_t h = part - layer_.heads - layer_.kv_heads;
                narrow_row(projected + values_at_ + h * layer_.value_dim, layer_.value_dim,
                           static_cast<T*>(call_.values) + h * call_.values_head + row * call_.values_row);
            }
        }
    }

    void rotate_head(const Norm& norm, float* head, int64_t t) {
        if (norm.weight) norm_row<T>(norm, head, layer_.key_dim, head);
        rotate<T>(head, static_cast<const T*>(call_.cosines) + t * layer_.key_dim,
                  static_cast<const T*>(call_.sines) + t * layer_.key_dim, layer_.key_dim);
    }

    // gated = activation(gate x) * (up x)
    void gate(const Team& team) {
        multiply_any<2>(team, normed_, ld_hidden_, tokens_, layer_.gate_up,
                        [&](int64_t t, int64_t unit, const float* results) {
                            vf part[2];
                            for (int half = 0; half < 2; ++half) {
                                vf sums[2] = {vload(results + half * VL), vload(results + PANEL + half * VL)};
                                for (int i = 0; i < 2; ++i) {
                                    if (layer_.gate_up.bias)
                                        sums[i] = vadd(sums[i], vload(layer_.gate_up.bias + (2 * unit + i) * PANEL + half * VL));
                                    sums[i] = vround_to<T>(sums[i]);
                                }
                                const vf active = vround_to<T>(activate(Activation(layer_.activation), sums[0]));
                                part[half] = vround_to<T>(vmul(active, sums[1]));
                            }
                            store_panel(gated_ + t * ld_gated_, unit * PANEL, layer_.intermediate, part[0], part[1]);
                        });
    }

    static thread_local Scratch scratch_;

    const Layer& layer_;
    const LayerCall& call_;
    const Step& step_;
    int64_t tokens_;
    Attention attention_;
    AttentionWork work_;
    int64_t ld_hidden_, ld_qkv_, ld_heads_, ld_gated_, keys_at_, values_at_;
    float *residual_, *projected_, *qkv_, *work_scratch_;
    A *normed_, *attended_, *gated_;
    std::atomic<int64_t> next_{0}, next_merge_{0};
};

template <class T> thread_local Scratch LayerRun<T>::scratch_;

// Layers one after the other, each on what the one before it has written.
template <class T>
static void run_layers(const Layer* const* layers, const LayerCall* calls, int64_t count, const Step& step, int threads) {
    for (int64_t i = 0; i < count; ++i) {
        LayerRun<T> run(*layers[i], calls[i], step, threads);
        parallel(threads, [&](Team team) { run.run(team); });
    }
}
