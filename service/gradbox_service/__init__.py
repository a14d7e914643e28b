"""The service: HTTP and job records. It never imports torch.

A posted job goes http → admission → jobs, and queue brings it to a worker; store holds its files,
ownership whose they are, cleaning ends what nobody needs, up runs a whole box. Read in that order.
"""
