"""HTTP with one box.

Read `connection` first: requests, retries, problems turned into errors; `http_client` says whom it
trusts, and sends the token. `events` follows a job over as many connections as that takes; `upload`
sends what the box does not have, but small blobs go with their job, whose small result comes with
the answer: `posting`; `download` fetches a result file and resumes where a connection broke;
`paths` are those of one job and one model. No other room opens a connection.
"""
