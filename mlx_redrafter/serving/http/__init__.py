"""HTTP: the process, the application, access checks and streams."""
