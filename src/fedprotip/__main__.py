from fedprotip.cli import main

main()
