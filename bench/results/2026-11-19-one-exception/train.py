import torch
import torch.distributed as dist


def load(step):
    if step == 3 and dist.get_rank() == 1:
        raise ValueError("bad batch 17")
    return torch.ones(4, 8)


def main():
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    for step in range(10):
        model(load(step)).sum().backward()


main()
