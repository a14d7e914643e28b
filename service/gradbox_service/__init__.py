"""The service: HTTP and job records. It never imports torch.

A posted job goes http → admission → jobs, and queue brings it to a worker; store holds its files,
ownership whose they are, cleaning ends what nobody needs, up runs a whole box. Read in that order.
Watching and dashboard show a box to its owner and its users, testing runs one in a test's process.

Beside the rooms: `settings`, and `backing`, all that a service stands on; `tokens`, `sessions` and
`revocations`, who may use it; `commands` and `storage_command`, its part of the command line;
`repeating_thread`, what the dispatcher and the cleaner are.
"""
