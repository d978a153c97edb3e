"""Feed-forward mode: the rank with attention asks CPU ranks of its pod for experts and MLPs, layer by layer.

Both ranks are in `rank`: `worker/asking` and `answering_rank`.

| module | what is in it |
|---|---|
| `remote_parts`, `columns`, `holes` | a feed-forward rank's layers and tensors, which part, what lacks |
| `slab_library`, `slab` | the shared memory that both sides map, and who proves it |
| `kernels.cu`, `cuda_exchange` | asking from a CUDA graph |
| `exchange`, `remote` | the asking side: what stands in for a layer's experts or MLP |
| `lane_judge` | which rank holds up the rank that asks |
| `read_rate` | how fast each rank reads, by which they share |
| `skeleton`, `compute` | the answering side: a model of its experts only, and a layer's part of it |
"""
