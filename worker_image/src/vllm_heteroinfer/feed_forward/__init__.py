"""Feed-forward mode: the rank with attention asks CPU ranks of its pod for experts and MLPs, layer by layer.

Both ranks are in `rank`: `worker/asking` and `answering_rank`.

| module | content |
|---|---|
| `remote_parts` | the layers whose parts feed-forward ranks compute |
| `recording`, `file_tensors`, `recipe` | the recipe: the regions of files that fill the experts |
| `expert_reader`, `expert_formats` | reading experts by the recipe, in each format |
| `slab_library`, `slab` | the shared memory that both sides map, and the proof that they do |
| `kernels.cu`, `cuda_exchange` | asking from a CUDA graph |
| `exchange`, `remote` | the asking side: replacements of a layer's experts or MLP |
| `lane_judge` | finds the rank that blocks the asking rank |
| `read_rate` | measures how fast each rank reads memory, to set their shares |
| `held`, `held_experts`, `compute` | the answering side: the experts of this rank, and their computation |
| `skeleton`, `columns`, `holes` | the MLPs of a dense model: this rank's columns, missing tensors |
"""
