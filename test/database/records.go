// Package database writes to a filesystem as a database does, and tells what is left of that in a snapshot.
package database

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
)

// RecordSize is the number of bytes of a record.
const RecordSize = 8 + sha256.Size

// chain is a sequence of records; each one names the one before by its checksum.
type chain struct {
	sum     [sha256.Size]byte
	records uint64
}

func (c *chain) next() []byte {
	record := binary.BigEndian.AppendUint64(nil, c.records)
	record = append(record, c.sum[:]...)
	c.sum = sha256.Sum256(record)
	c.records++
	return record
}

// Writer writes each record into one file and then into a second one.
type Writer struct{ files [2]*os.File }

// Create makes the files, each in a directory.
func Create(first, second string) (w Writer, err error) {
	for i, path := range []string{first + "/first", second + "/second"} {
		if w.files[i], err = os.Create(path); err != nil {
			return w, err
		}
	}
	return w, nil
}

// Run writes while more, which is told how many records there are, says so. With sync a record
// is on the device of the first file before it gets into the second.
func (w Writer) Run(sync bool, more func(records uint64) bool) (err error) {
	defer func() { err = errors.Join(err, w.files[0].Close(), w.files[1].Close()) }()
	for c := new(chain); more(c.records); {
		record := c.next()
		if _, err := w.files[0].Write(record); err != nil {
			return err
		}
		if sync {
			if err := w.files[0].Sync(); err != nil {
				return err
			}
		}
		if _, err := w.files[1].Write(record); err != nil {
			return err
		}
	}
	return nil
}

// count counts the records of a file. One that is missing or torn is an error.
func count(path string) (uint64, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	c := new(chain)
	for len(raw) > 0 {
		record := c.next()
		if !bytes.HasPrefix(raw, record) {
			return 0, fmt.Errorf("%s is broken at record %d", path, c.records-1)
		}
		raw = raw[len(record):]
	}
	return c.records, nil
}

// Check counts the records. It is an error where the files are not as if the writer had been
// stopped at one moment: the second one has what the first one has, or one record less.
func Check(first, second string) (uint64, error) {
	one, err := count(first + "/first")
	if err != nil {
		return 0, err
	}
	two, err := count(second + "/second")
	if err == nil && one != two && one != two+1 {
		err = fmt.Errorf("%d records in the first file and %d in the second", one, two)
	}
	return one, err
}
