"""job_files → worlds → job → collectives, findings: what the recordings of a job's ranks say."""
