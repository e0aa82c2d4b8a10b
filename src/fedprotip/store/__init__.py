"""What lasts on disk: atomic files, objects by hash, client state, the run folder."""
