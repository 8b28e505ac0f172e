"""Which node and device an engine gets, and how a fragmented cluster is put right."""
