"""Clients, server and the loop between them. Read `loop.py` first: it is Algorithm 1."""
