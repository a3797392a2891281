// Files does with small files what workloads do, in a directory, and prints how long each
// step took: a JSON object of nanoseconds.
package main

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

// fuseTime is longer than a FUSE client believes attributes without asking again.
const fuseTime = 1500 * time.Millisecond

func main() {
	if err := run(os.Args[1], os.Args[2], os.Args[3:]); err != nil {
		fmt.Fprintln(os.Stderr, "files:", err)
		os.Exit(1)
	}
}

// run makes the steps: with so many files in a tree, and half as many in one directory.
func run(dir, size string, steps []string) error {
	files, err := strconv.Atoi(size)
	if err != nil {
		return err
	}
	if err := os.Chdir(dir); err != nil {
		return err
	}
	took := make(map[string]time.Duration)
	for _, step := range steps {
		if step == "later" {
			time.Sleep(fuseTime)
		}
		began := time.Now()
		if err := do(step, files); err != nil {
			return fmt.Errorf("%s: %w", step, err)
		}
		took[step] = time.Since(began)
	}
	return json.NewEncoder(os.Stdout).Encode(took)
}

func do(step string, files int) error {
	switch step {
	case "make":
		return eachFile("made", files, 50, write)
	case "clear":
		return eachFile("made", files, 50, os.Remove)
	case "create":
		return eachFile("flat", files/2, files, write)
	case "unlink":
		return eachFile("flat", files/2, files, os.Remove)
	}
	return walk("tree", files)
}

// eachFile does something with files, of which so many are in a directory.
func eachFile(dir string, count, together int, do func(path string) error) error {
	for n := range count {
		in := fmt.Sprintf("%s/%d", dir, n/together)
		if n%together == 0 {
			if err := os.MkdirAll(in, 0o755); err != nil {
				return err
			}
		}
		if err := do(fmt.Sprintf("%s/%d", in, n)); err != nil {
			return err
		}
	}
	return nil
}

func write(path string) error { return os.WriteFile(path, make([]byte, 1024), 0o600) }

func walk(dir string, files int) error {
	found := 0
	err := filepath.WalkDir(dir, func(_ string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		found++
		_, err = entry.Info()
		return err
	})
	if err == nil && found < files {
		err = fmt.Errorf("only %d files", found)
	}
	return err
}
