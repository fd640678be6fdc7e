"""Files of a run that survive a kill: atomic writes, locks, layout, records and their damage."""
