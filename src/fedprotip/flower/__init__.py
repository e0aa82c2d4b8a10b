"""Across machines with Flower: a SuperLink where the run is, and a program for every site (docs/deploy.md).

`deployment.py`: one TOML file says what is where; `processes.py`: what this machine runs of it; `submission.py`: a run
over it; `keys.py`: certificates and keys. `site.py` is the program of a site. `relay.py` and `run.py` are what Flower
starts: for a message at a site, and for a run at the SuperLink.
"""
