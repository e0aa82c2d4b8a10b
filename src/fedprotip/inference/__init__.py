"""From features to a task and a label (section 4.4)."""
