// Writer is a database in a container. In one directory it has its first file, in another
// the second one; the third one is shared with the host, which reads there how many records
// are acknowledged, and ends it by a file `stop`. With one directory it counts the records
// there.
package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"github.com/crust-proxy/crust-proxy/test/database"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "writer:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch len(args) {
	case 1:
		count, err := database.Records(args[0])
		fmt.Println(count)
		return err
	case 3:
		err := write(args[0], args[1], args[2])
		return errors.Join(err, os.WriteFile(args[2]+"/ended", []byte(fmt.Sprint(err)), 0o600))
	}
	return errors.New("usage: writer FIRST SECOND SHARED, or writer DIRECTORY to count")
}

func write(first, second, shared string) error {
	acknowledged, err := os.Create(shared + "/acknowledged") //nolint:gosec // given by a test
	if err != nil {
		return err
	}
	w, err := database.Create(first, second)
	if err != nil {
		return err
	}
	var failed error
	err = w.Run(true, func(records uint64) bool {
		_, failed = acknowledged.WriteAt(binary.BigEndian.AppendUint64(nil, records), 0)
		_, missing := os.Stat(shared + "/stop")
		return failed == nil && missing != nil
	})
	return errors.Join(err, failed, acknowledged.Close())
}
