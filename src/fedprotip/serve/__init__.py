"""A finished run behind HTTP: `POST /predict`, and a page to drop images on (extra `serve`)."""
