"""What everything else stands on: errors, atomic files, processes of a shared run, progress, provenance, fetching."""
