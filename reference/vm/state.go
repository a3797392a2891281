package vm

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/process"
)

// place is the directory of a sandbox, which is root's alone.
type place string

func (p place) in(name string) string { return filepath.Join(string(p), name) }
func (p place) control() string       { return p.in("control.sock") }
func (p place) volumes() string       { return p.in("volumes.sock") }
func (p place) log() string           { return p.in("log") }
func (p place) containers() string    { return p.in("containers") }
func (p place) share() share          { return share{made: p.in("tree"), shown: p.in("shared")} }

// record is what is written down of a container, or of the sandbox itself.
type record struct {
	ID      string `json:"id"`
	Sandbox string `json:"sandbox"`
	Bundle  string `json:"bundle"`
	// Group is its control group on the host, or "" where it has none.
	Group string `json:"group,omitempty"`
	// Process stands for it on the host: the supervisor of a sandbox, or the proxy of a
	// container.
	Process process.Process `json:"process"`
	// Shim made the sandbox; when it is gone, nobody knows the sandbox any more.
	Shim    process.Process `json:"shim"`
	Started bool            `json:"started"`
}

func (r *record) isSandbox() bool { return r.ID == r.Sandbox }

// errUnknown is what runc says, and what its callers look for.
var errUnknown = errors.New("container does not exist")

// find reads the record of a container by its id alone, which is all that a command gets.
func (c Config) find(id string) (*record, error) {
	if !abi.IsSandboxID(id) {
		return nil, fmt.Errorf("%q cannot be the id of a container", id)
	}
	sandboxes, err := os.ReadDir(c.StateDir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("the sandboxes of crust-vm cannot be listed (only root can): %w", err)
	}
	for _, sandbox := range sandboxes {
		r, err := readRecord(filepath.Join(c.sandbox(sandbox.Name()).containers(), id))
		if !errors.Is(err, os.ErrNotExist) {
			return r, err
		}
	}
	return nil, fmt.Errorf("%q: %w", id, errUnknown)
}

func readRecord(file string) (*record, error) {
	raw, err := os.ReadFile(file) //nolint:gosec // in a directory of root's
	if err != nil {
		return nil, err
	}
	r := new(record)
	return r, json.Unmarshal(raw, r)
}

// write keeps the record, as a whole or not at all.
func (c Config) write(r *record) error {
	dir := c.sandbox(r.Sandbox).containers()
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("sandbox %s: %w", r.Sandbox, err)
	}
	raw, err := json.Marshal(r)
	if err != nil {
		return err
	}
	temp := c.sandbox(r.Sandbox).in("." + r.ID)
	if err := os.WriteFile(temp, raw, 0o600); err != nil {
		return err
	}
	return os.Rename(temp, filepath.Join(dir, r.ID))
}

func (c Config) forget(r *record) error {
	if err := r.leave(); err != nil {
		return err
	}
	return os.Remove(filepath.Join(c.sandbox(r.Sandbox).containers(), r.ID))
}

// status is a word of the OCI runtime specification.
func (r *record) status() string {
	switch {
	case r.Process.Ended():
		return "stopped"
	case r.Started:
		return "running"
	default:
		return "created"
	}
}

// end kills this process, and no other one with its number, and waits until it is gone.
func end(p process.Process, most time.Duration) error {
	held, err := os.FindProcess(p.PID) // first of all: then it stays the same
	if err == nil && p.Lives() {
		err = held.Kill()
	}
	if err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	if !gone(p, most) {
		return fmt.Errorf("process %d does not end", p.PID)
	}
	return nil
}

// gone waits for the end of a process.
func gone(p process.Process, most time.Duration) bool {
	for until := time.Now().Add(most); !p.Ended(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(until) {
			return false
		}
	}
	return true
}

// sweep ends sandboxes that nobody knows any more: their shim is gone, or their bundle.
func (c Config) sweep() error {
	files, err := filepath.Glob(filepath.Join(c.StateDir, "*", "containers", "*"))
	if err != nil {
		return err
	}
	var errs []error
	for _, file := range files {
		r, err := readRecord(file)
		if err != nil || !r.isSandbox() {
			continue // of one that is being removed, or of a container
		}
		if _, err := os.Stat(r.Bundle); !errors.Is(err, os.ErrNotExist) && !r.Shim.Ended() {
			continue
		}
		if err := end(r.Process, endTime); err != nil {
			errs = append(errs, fmt.Errorf("sandbox %s was left behind and cannot be ended: %w", r.ID, err))
			continue
		}
		errs = append(errs, c.sandbox(r.ID).remove())
	}
	return errors.Join(errs...)
}

// endTime bounds the wait for a killed process.
const endTime = 10 * time.Second

// remove removes what is left of a sandbox whose supervisor has ended.
func (p place) remove() error {
	if err := p.share().close(); err != nil {
		return err
	}
	records, err := filepath.Glob(p.containers() + "/*")
	if err != nil {
		return err
	}
	for _, file := range records {
		if r, err := readRecord(file); err == nil {
			if err := r.leave(); err != nil {
				return err
			}
		}
	}
	// A kill can leave a record that was not renamed yet, and the socket of virtiofsd.
	left, err := filepath.Glob(p.in(".*"))
	if err != nil {
		return err
	}
	records = append(append(left, p.in("fs.sock")), records...)
	return remove(append(records, p.control(), p.volumes(), p.log(), p.containers(), string(p))...)
}
