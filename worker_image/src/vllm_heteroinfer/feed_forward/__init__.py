"""Feed-forward mode: the rank with attention asks CPU ranks of its pod for experts and MLPs, layer by layer.

Both ranks are in `rank`: `worker/asking` and `answering_rank`.

| module | content |
|---|---|
| `remote_parts`, `mlps` | the parts that feed-forward ranks compute, while the model is built |
| `recording`, `file_tensors`, `recipe` | the recipe: the regions of files that fill experts and MLPs |
| `expert_reader`, `expert_formats` | reading experts by the recipe, in each format; an MLP is one expert |
| `slab_library`, `slab` | the shared memory that both sides map, and the proof that they do |
| `kernels.cu`, `cuda_exchange` | asking from a CUDA graph |
| `exchange`, `remote` | the asking side: replacements of a layer's experts or MLP |
| `offered_weights` | the place of the weights of ranks, for a GPU of their pod |
| `shared_exchange` | the GPU computes some experts of long asks; lists its own modules |
| `lane_judge` | finds the rank that blocks the asking rank |
| `read_rate` | measures how fast each rank reads memory, to set their shares |
| `held`, `held_experts`, `compute` | the answering side: the parts of this rank, and their computation |
"""
