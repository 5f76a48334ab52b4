"""The digits once more, with Hugging Face Accelerate over the closeranks backend.

    closeranks run -n 2 examples/accelerate_digits.py
    torchrun --standalone --nproc-per-node=2 examples/accelerate_digits.py

Accelerate wraps the model in torch's own DistributedDataParallel. On a CPU it chooses between gloo
and MPI by itself and refuses every other name, but it takes the process group that is there: so
the group is made before the Accelerator. Needs `pip install 'closeranks[examples]'`.
"""

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from digits import Net, load_digits, prove_replicas_equal
from torch.utils.data import DataLoader

import closeranks  # noqa: F401 - gives torch.distributed the backend


def main() -> int:
    dist.init_process_group("closeranks")
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(accelerator.process_index)  # wrapping gives all of them rank 0's parameters
    train_set, held_out = load_digits()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(train_set, batch_size=32, shuffle=True)
    test_loader = DataLoader(held_out, batch_size=100)
    model, optimizer, loader, test_loader = accelerator.prepare(
        model, optimizer, loader, test_loader
    )
    accelerator.print(f"{type(model).__name__} over {dist.get_backend()}")

    for epoch in range(1, 4):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
        model.eval()
        right = seen = 0
        for images, labels in test_loader:
            with torch.no_grad():
                guesses = model(images).argmax(dim=1)
            guesses, labels = accelerator.gather_for_metrics((guesses, labels))
            right += int((guesses == labels).sum())
            seen += len(labels)
        accelerator.print(f"epoch {epoch}  accuracy {right / seen:.1%} ({right} of {seen})")

    equal = prove_replicas_equal(accelerator.unwrap_model(model))
    dist.barrier()
    accelerator.end_training()  # destroys the process group as well
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
