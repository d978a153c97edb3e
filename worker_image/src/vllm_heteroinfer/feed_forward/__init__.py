"""Mode FeedForward: a rank with attention lets feed-forward ranks (CPUs) compute experts and MLPs.

For each layer, the asking rank (with attention) writes its rows into a slab, which is shared memory. This
request is an ask. Each feed-forward rank has a place in the slab, its lane. The rank computes its part of the
layer and writes an answer into its lane. The asking rank adds the answers. The code of the two kinds of ranks
is in `rank/worker/asking` and `rank/answering_rank`.

| module | content |
|---|---|
| `remote_parts`, `mlps` | replace experts and MLPs of the asking rank by parts without weights |
| `recording`, `file_tensors`, `recipe` | the recipe: which regions of which files fill experts and MLPs |
| `expert_reader`, `expert_formats` | read experts by the recipe, in each format; an MLP is one expert |
| `slab_library`, `slab` | the slab, and the proof that both sides map the same memory |
| `kernels.cu`, `cuda_exchange` | ask from a CUDA graph |
| `exchange`, `remote` | ask from a CPU rank; replacements of a layer's experts or MLP |
| `offered_weights` | where a rank has its weights, for a GPU of its pod that copies them |
| `shared_exchange` | lets the GPU compute some experts of long batches. Its docstring lists its modules |
| `lane_judge` | finds the rank that blocks the asking rank |
| `read_rate` | measures how fast each rank reads memory, to divide layers among the ranks |
| `held`, `held_experts`, `compute` | the parts that a feed-forward rank has, and how it computes them |
"""
