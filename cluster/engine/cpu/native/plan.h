// What the queries of a step see, worked out once for all layers.
#pragma once

#include <cstdint>

// Sequence s owns pool rows from starts[s] on: lengths[s] committed tokens, then the widths[s] tokens of this step.
// A query at node i of the step's tokens sees the rows [start, start + length + trunk) as the positions of the same
// number, then `tail` nodes at the positions that follow, the last of them itself. For a chain the trunk is all.
struct Step {
    int64_t sequences, tokens;
    const int64_t *starts, *lengths, *widths;
    const int64_t* first;  // [sequences] index of a sequence's first query among the step's tokens
    int32_t* trunk;        // [tokens]
    int32_t* depth;        // [tokens] position of the query - length of its sequence
    int64_t* tail;         // [tokens] where the query's tail begins in `nodes`
    int32_t* nodes;        // tails: indices among the sequence's tokens of this step
};

// Fills the arrays of `step`. ancestors + offsets[s] is the [width, width] ancestor-or-self relation of sequence s, rows
// are queries; a negative offset means a chain. Returns -1, or the first sequence whose relation is not that of a tree
// with parents before children.
static int64_t plan(const Step& step, const uint8_t* ancestors, const int64_t* offsets) {
    int64_t used = 0;
    for (int64_t s = 0; s < step.sequences; ++s) {
        const int64_t width = step.widths[s], first = step.first[s];
        const bool chain = !ancestors || offsets[s] < 0;
        for (int64_t i = 0; i < width; ++i) {
            const int64_t t = first + i;
            step.tail[t] = used;
            if (chain) {
                step.trunk[t] = int32_t(i + 1);
                step.depth[t] = int32_t(i);
                continue;
            }
            const uint8_t* seen = ancestors + offsets[s] + i * width;
            if (!seen[i]) return s;
            for (int64_t j = i + 1; j < width; ++j)
                if (seen[j]) return s;
            int64_t parent = i - 1;
            while (parent >= 0 && !seen[parent]) --parent;
            // the ancestors of a node are its parent's and itself
            const uint8_t* inherited = parent < 0 ? nullptr : ancestors + offsets[s] + parent * width;
            for (int64_t j = 0; j < i; ++j)
                if (bool(seen[j]) != (inherited && inherited[j])) return s;
            int64_t trunk = 0, depth = 0;
            while (trunk <= i && seen[trunk]) ++trunk;
            for (int64_t j = trunk; j <= i; ++j)
                if (seen[j]) step.nodes[used++] = int32_t(j);
            depth = trunk + (used - step.tail[t]) - 1;
            step.trunk[t] = int32_t(trunk);
            step.depth[t] = int32_t(depth);
        }
    }
    return -1;
}
