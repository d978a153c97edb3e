"""Feed-forward mode: the rank with attention asks CPU ranks of its pod for experts and MLPs, layer by layer.

Both ranks are in `rank`: `worker/asking` and `answering_rank`.

| module | what is in it |
|---|---|
| `remote_parts`, `columns`, `holes` | a feed-forward rank's layers, its parts of tensors, missing tensors |
| `slab_library`, `slab` | the shared memory that both sides map, and the proof that they do |
| `kernels.cu`, `cuda_exchange` | asking from a CUDA graph |
| `exchange`, `remote` | the asking side: replacements of a layer's experts or MLP |
| `lane_judge` | finds the rank that blocks the asking rank |
| `read_rate` | measures how fast each rank reads memory, to set their shares |
| `skeleton`, `compute` | the answering side: a model with its experts only, and their computation |
"""
