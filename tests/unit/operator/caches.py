"""The operator's caches without an API server. A test adds objects like a watch would."""

from typing import Any

from heteroinfer_operator.kube.cluster_state import ClusterState


class Caches:
    """All caches in cluster scope, and their clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.version = 100
        self.state = ClusterState(
            None,  # type: ignore[arg-type]  # nothing is read
            namespaces=(),
            touched=lambda key: None,
            nodes_changed=lambda: None,
            clock=lambda: self.now,
        )

    def show(self, path: str, stored: dict[str, Any]) -> None:
        self.version += 1
        metadata = {**stored["metadata"], "resourceVersion": str(self.version)}
        classes = self.state._classes  # not part of `all`: nothing waits for it
        assert classes is not None
        for cache in (*self.state.awaited_caches(), classes):
            cache.synced.set()
            if cache.collection.path == path:
                cache.store_written({**stored, "metadata": metadata})
