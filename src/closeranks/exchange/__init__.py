"""How n ranks end with the same reduced tensor. Knows nothing of modules, gradients or buckets.

`base` is the seam: what every exchange can do. `group` is the exchange over any c10d process
group. `attendance` tells who came to an exchange and who did not.
"""
