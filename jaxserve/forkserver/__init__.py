"""Jobs of requests in processes of their own: a fork server per kind of job, which forks a child under limits for each."""
