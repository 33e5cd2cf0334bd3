"""Black box, records, incidents, and the process that keeps them."""
