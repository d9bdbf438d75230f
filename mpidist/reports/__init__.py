"""job_files → job → collectives, findings: what the recordings of a job's ranks say."""
