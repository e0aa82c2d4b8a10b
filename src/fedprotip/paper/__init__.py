"""The paper: its numbers, its experiments as rows of settings, and running what is missing of them."""
