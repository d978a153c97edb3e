"""The OpenAI server of the leader and its engine, with the settings that every rank resolves as they do.

Runs in two processes of the leader's pod: the API server, and its child, the engine core.
"""
