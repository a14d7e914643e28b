"""The process of a worker that has its jobs run by devices of the cluster.

main, serving       its entry point, and its loop
joined              the cluster as it sees it
whole_job           a job that one device runs
wide_job            a job that several run: `wide_computations` in two phases, `wide_samples`
waiting_graphs      where graphs of a forward job wait for the gradient job
open_devices      the devices of one wide job; `ray_devices` and `ray_sample_devices` are what
                    the engine sees of them
"""
