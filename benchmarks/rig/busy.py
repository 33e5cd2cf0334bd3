"""A process that keeps one core busy at normal priority until it is ended."""


def main() -> None:
    number = 0
    while True:
        number += 1


if __name__ == "__main__":
    main()
