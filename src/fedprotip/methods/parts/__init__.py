"""What methods are made of: one file per part, each used by at least one method."""
