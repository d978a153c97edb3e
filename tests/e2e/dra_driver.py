"""Runs a driver of one device for dynamic resource allocation, as root in the namespaces of a node.

`python -m tests.e2e.dra_driver` registers with the kubelet, and answers it until it is ended. A container
with the device gets the variable DEVICE_VARIABLE by CDI. There is no hardware. This module encodes the gRPC
messages itself, because those of the kubelet's registration and of its API `dra/v1` have few fields.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

DRIVER = "device.example.test"
POOL = "pool"
DEVICE = "one"
DEVICE_VARIABLE = "EXAMPLE_DEVICE"
_CDI_KIND = "example.test/device"
_CDI_FILE = Path("/run/cdi/example.json")
_KUBELET = Path("/var/lib/kubelet")
_ANSWERS = _KUBELET / "plugins" / DRIVER / "dra.sock"
_REGISTRATION = _KUBELET / "plugins_registry" / f"{DRIVER}-reg.sock"
_ONE_BYTE_LENGTH = 128


def claims(template: str) -> list[dict[str, Any]]:
    """Returns a class of devices, and a template of claims for a device of this class."""
    kind = {"apiVersion": "resource.k8s.io/v1"}
    selector = {"cel": {"expression": f"device.driver == '{DRIVER}'"}}
    request = {"name": "any", "exactly": {"deviceClassName": DRIVER}}
    spec = {"spec": {"devices": {"requests": [request]}}}
    return [
        {**kind, "kind": "DeviceClass", "metadata": {"name": DRIVER}, "spec": {"selectors": [selector]}},
        {**kind, "kind": "ResourceClaimTemplate", "metadata": {"name": template}, "spec": spec},
    ]


def offer(node: str) -> dict[str, Any]:
    """Returns the ResourceSlice that offers the device on a node."""
    pool = {"name": POOL, "generation": 1, "resourceSliceCount": 1}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": DRIVER},
        "spec": {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": [{"name": DEVICE}]},
    }


def encode(number: int, content: bytes) -> bytes:
    """Encodes a field of a message: a text, or an embedded message."""
    assert len(content) < _ONE_BYTE_LENGTH**2
    low, high = len(content) % _ONE_BYTE_LENGTH, len(content) // _ONE_BYTE_LENGTH
    length = bytes([low | _ONE_BYTE_LENGTH, high]) if high else bytes([low])
    return bytes([number << 3 | 2]) + length + content


def decode(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields number and content of each field of a message with only texts and messages."""
    at = 0
    while at < len(message):
        number, length, at = message[at] >> 3, message[at + 1], at + 2
        if length >= _ONE_BYTE_LENGTH:
            length, at = length % _ONE_BYTE_LENGTH + message[at] * _ONE_BYTE_LENGTH, at + 1
        yield number, message[at : at + length]
        at += length


def answer_claims(request: bytes, answer: bytes) -> bytes:
    """Returns the same answer for each claim of a request, by the claim's uid."""
    uids = [dict(decode(claim))[2] for _, claim in decode(request)]
    return b"".join(encode(1, encode(1, uid) + encode(2, answer)) for uid in uids)


def prepare(request: bytes, _: object) -> bytes:
    """Returns the device for each claim."""
    texts = ((2, POOL), (3, DEVICE), (4, f"{_CDI_KIND}={DEVICE}"))
    device = b"".join(encode(number, text.encode()) for number, text in texts)
    return answer_claims(request, encode(1, device))


def unprepare(request: bytes, _: object) -> bytes:
    """Confirms that each claim no longer has a device."""
    return answer_claims(request, b"")


def introduce(_: bytes, __: object) -> bytes:
    """Returns the registration data of the driver for the kubelet."""
    texts = ((1, "DRAPlugin"), (2, DRIVER), (3, str(_ANSWERS)), (4, "v1.DRAPlugin"))
    return b"".join(encode(number, text.encode()) for number, text in texts)


def note_registration(status: bytes, _: object) -> bytes:
    """Prints the kubelet's answer to the registration."""
    print("registered", status, flush=True)
    return b""


def serve(socket: Path, service: str, methods: Mapping[str, Callable[[bytes, object], bytes]]) -> Any:
    """Starts a gRPC server on a socket. Returns it, because the server ends with its last reference."""
    import grpc

    socket.parent.mkdir(parents=True, exist_ok=True)
    socket.unlink(missing_ok=True)
    handlers = {name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()}
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    return server


def main() -> None:
    """Registers the driver, and answers the kubelet."""
    edits = {"env": [f"{DEVICE_VARIABLE}={DEVICE}"]}
    specification = {"cdiVersion": "0.6.0", "kind": _CDI_KIND}
    _CDI_FILE.parent.mkdir(parents=True, exist_ok=True)
    _CDI_FILE.write_text(
        json.dumps({**specification, "devices": [{"name": DEVICE, "containerEdits": edits}]})
    )
    preparation = {"NodePrepareResources": prepare, "NodeUnprepareResources": unprepare}
    registration = {"GetInfo": introduce, "NotifyRegistrationStatus": note_registration}
    servers = [
        serve(_ANSWERS, "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin", preparation),
        serve(_REGISTRATION, "pluginregistration.Registration", registration),
    ]
    threading.Event().wait()
    del servers


if __name__ == "__main__":
    main()
