"""The container files, built and started for real: `make containers`.

`docker` and `buildah` each build the images and start what docker-compose.yml describes, which
`compose` reads; `first_job` submits one job from outside; `__main__` chooses the engine.
"""
