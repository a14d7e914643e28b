"""The service's HTTP side: from a socket to a call of admission, records and stores, and back.

To read in this order:

    server, listening    uvicorn, the address, TLS
    connections          what a connection may send, and how slowly bytes may move on it
    app                  the app put together: state, middleware, routes
    auth                 whose token or session, whose job
    request_rate         how many requests a second of one sender
    allowances           how many streams and transfers one owner may have open
    bodies               bodies that are read whole: posted jobs with their blobs, and small ones
    paging               lists, a page at a time
    waiting              answers that wait for a job's end, and hold its small result
    routes/              one module a noun
    event_hub            one reader of events for all listeners
    problems             every error as problem+json
    openapi              what /openapi.json says
"""
