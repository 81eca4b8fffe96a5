"""One engine over several hosts: the leader broadcasts step plans, and every host runs the same programs in the same order.

Host 0 is the leader: its engine process has the scheduler. Each other host is a worker: a process with an executor and no
scheduler. Arrays never cross the sockets of this package: collectives inside the programs exchange them
(`jax.distributed`). Two channels connect a worker with the leader, both ZeroMQ over TCP:

control  joining, agreement at the start, signs of life, the end; a thread of its own at both ends
plans    step plans and operator's commands, one way, in order; read by the thread that submits steps
"""
