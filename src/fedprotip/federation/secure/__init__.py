"""Sums of the clients' vectors of which the server learns nothing but the sum (`method.secure`).

`ring.py`: from a reply to integers modulo 2^64 and back; `masks.py`: Bonawitz et al. 2017, without any messages;
`signed.py`: whose keys are whose, where sites have keys; `demands.py`: what a client asks of a plan; `desk.py`: a
client's part in it; `sums.py`: the server's.
What it protects from whom: docs/privacy.md.
"""
