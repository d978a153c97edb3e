"""The leader's OpenAI server and its engine. All ranks derive their settings in the same way.

Runs in two processes of the leader's pod: vLLM's API server, and its child, the engine core.
"""
