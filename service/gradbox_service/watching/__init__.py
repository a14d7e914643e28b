"""What a box says of itself to those who watch it: metrics, and one log line a job and a request.

To read in this order:

    metrics       the counters and histograms of one service process
    scrape        what is looked up when Prometheus asks: queue, runs, devices, storage
    requests      gives every request an id, counts it and logs it
"""
