"""The process that owns the cluster's actors, so that they end with it.

head                has one actor for every device of every machine, and the pool
machine             which devices a machine has
leases, pool        which device runs for whom; `coordinator_watch` notices that one died,
                    `emptying` makes devices empty before they are leased again, `reloading`
                    restarts those whose models may be old, `kept_messages` has what they log
ray_session         Ray started on this machine, or joined; `ray_environment` is what it is told
                    before it is imported
model_versions      whether all devices have the same models
address_file        how coordinators reach the cluster
"""
