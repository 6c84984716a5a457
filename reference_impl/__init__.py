"""A reranker fine-tune with FSDP2, checkpointed so that it comes back exactly.

    python -m reference_impl train run.yaml steps=40
    torchrun --nproc_per_node 2 -m reference_impl train run.yaml steps=40
    torchrun --nproc_per_node 2 -m reference_impl evaluate run.yaml

From Python, on every rank:

    from reference_impl.config import Config
    from reference_impl.trainer import Trainer

    trainer = Trainer(Config(model="my/model", data="pairs.jsonl", output_dir="runs/1"))
    trainer.build()
    trainer.resume()
    trainer.train_step()
    trainer.save(final=True)
    trainer.close()

Importing this package starts no thread, process group or CUDA context.
"""
