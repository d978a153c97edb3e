"""Tests that the API server ends with a message if one of its tasks raises.

Stubs replace the parts of vLLM.
"""

import subprocess
import sys
from pathlib import Path

from heteroinfer_contract import names
from heteroinfer_contract.failure import FailureReason
from vllm_heteroinfer.pod.channel import RankChannel, RankMessage

ROOT = Path(__file__).parents[3]
SERVE = """
import asyncio, contextlib, socket, sys, types
from vllm_heteroinfer.engine import api_server
from vllm_heteroinfer.pod.channel import RankReporter

class Client:
    looks = 0
    _logger_ref = [None]

    async def generate(self, *_):
        yield types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=[1, 2])])

    @property
    def errored(self):
        Client.looks += 1
        if Client.looks > 3:
            raise RuntimeError("the look at the engine raised")
        return False

    async def is_sleeping(self):
        return False

    async def sleep(self, level=1, mode="abort"):
        pass

    def shutdown(self, timeout=None):
        pass

@contextlib.asynccontextmanager
async def build_async_engine_client(args):
    yield Client()

async def build_and_serve(*_):
    await asyncio.sleep(600)

entry = types.ModuleType("entry")
entry.build_async_engine_client, entry.build_and_serve = build_async_engine_client, build_and_serve
launcher = types.ModuleType("launcher")
launcher.setup_server = lambda args, reuse_port: ("", socket.socket())
launchers, api = types.ModuleType("launchers"), types.ModuleType("api_server")
api.entry = entry
for name, module in {"": types.ModuleType("entrypoints"), ".launchers": launchers,
                     ".launchers.api_server": api, ".launchers.api_server.entry": entry,
                     ".launchers.launcher": launcher}.items():
    sys.modules["vllm.entrypoints" + name] = module
vllm = sys.modules["vllm"] = types.ModuleType("vllm")
vllm.SamplingParams = lambda **_: None
asyncio.run(api_server.serve(None, RankReporter(socket.socket(fileno=int(sys.argv[1])), None, lambda: None)))
"""


def test_an_error_in_a_watcher_ends_the_api_server_with_a_message() -> None:
    """Otherwise the API server would not learn of a drain, and would outlive its engine."""
    channel, theirs = RankChannel.open_pair()
    with theirs:
        command = [sys.executable, "-c", SERVE, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=ROOT, stderr=subprocess.PIPE)
    try:
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    messages: list[RankMessage] = channel.read()
    channel.close()
    assert process.returncode == names.EXIT_RANK_FAILED, errors.decode()
    (failure,) = [message.failure for message in messages if message.failure]
    assert failure.reason is FailureReason.API_SERVER_EXITED
    assert failure.message == "vLLM's API server: the look at the engine raised"
