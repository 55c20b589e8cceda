"""The verbs that people call: each is a selection, a hook and a sink.

Each verb has a folder or file. `hookline` imports a verb when it is first used.
"""
