package vm

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/process"
	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
)

// sandboxDir is the directory of a sandbox below stateDir. Only root can enter it.
type sandboxDir string

func (d sandboxDir) file(name string) string { return filepath.Join(string(d), name) }
func (d sandboxDir) controlSocket() string   { return d.file("control.sock") }
func (d sandboxDir) volumesSocket() string   { return d.file("volumes.sock") }
func (d sandboxDir) log() string             { return d.file("log") }
func (d sandboxDir) records() string         { return d.file("containers") }
func (d sandboxDir) share() share            { return share{tree: d.file("tree"), mount: d.file("shared")} }

// record is the state of a container, or of the sandbox itself, between two commands.
type record struct {
	ID      string `json:"id"`
	Sandbox string `json:"sandbox"`
	Bundle  string `json:"bundle"`
	// Group is its control group on the host, or "" if it has none.
	Group string `json:"group,omitempty"`
	// Process represents it on the host: the supervisor of a sandbox, or the proxy of a container.
	Process process.Process `json:"process"`
	// Shim created the sandbox. When the shim is gone, no one manages the sandbox any more.
	Shim    process.Process `json:"shim"`
	Started bool            `json:"started"`
}

func (r *record) isSandbox() bool { return r.ID == r.Sandbox }

// errUnknown has the text of runc's error, which its callers search for.
var errUnknown = errors.New("container does not exist")

// findRecord reads the record of a container. A command gets the container's id alone, so all sandboxes are searched.
func (c Config) findRecord(id string) (*record, error) {
	if !abi.IsSandboxID(id) {
		return nil, fmt.Errorf("%q cannot be the id of a container", id)
	}
	sandboxes, err := os.ReadDir(c.StateDir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("the sandboxes of crust-vm cannot be listed (only root can): %w", err)
	}
	for _, sandbox := range sandboxes {
		if sandbox.Type().IsRegular() {
			continue
		}
		r, err := readJSON[record](filepath.Join(c.sandbox(sandbox.Name()).records(), id))
		if !errors.Is(err, os.ErrNotExist) {
			return r, err
		}
	}
	return nil, fmt.Errorf("%q: %w", id, errUnknown)
}

// readJSON reads a record, or what the caller of a command, who is root, names.
func readJSON[T any](file string) (*T, error) {
	raw, err := os.ReadFile(file) //nolint:gosec // only root can write there
	if err != nil {
		return nil, err
	}
	into := new(T)
	return into, json.Unmarshal(raw, into)
}

// createRecord fails if the container has a record: another command creates it.
func (c Config) createRecord(r *record) error { return c.putRecord(r, os.Link) }

// writeRecord replaces the record atomically.
func (c Config) writeRecord(r *record) error { return c.putRecord(r, os.Rename) }

func (c Config) putRecord(r *record, put func(temp, file string) error) error {
	dir := c.sandbox(r.Sandbox)
	if err := os.Mkdir(dir.records(), 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("sandbox %s: %w", r.Sandbox, err)
	}
	raw, err := json.Marshal(r)
	if err != nil {
		return err
	}
	temp := dir.file("." + r.ID + "." + strconv.Itoa(os.Getpid()))
	if err := os.WriteFile(temp, raw, 0o600); err != nil {
		return err
	}
	return errors.Join(put(temp, filepath.Join(dir.records(), r.ID)), remove(temp))
}

// deleteRecord removes the record and the control group of a container.
func (c Config) deleteRecord(r *record) error {
	if err := r.removeGroup(); err != nil {
		return err
	}
	return os.Remove(filepath.Join(c.sandbox(r.Sandbox).records(), r.ID))
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

// kill kills a process and waits for its end. It never kills another process that got the same pid.
func kill(p process.Process, timeout time.Duration) error {
	held, err := os.FindProcess(p.PID) // before the check: from now on the pid is not reused
	if err == nil && p.Lives() {
		err = held.Kill()
	}
	if err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	if !waitEnded(p, timeout) {
		return fmt.Errorf("process %d does not end", p.PID)
	}
	return nil
}

// waitEnded reports whether the process ends before the timeout.
func waitEnded(p process.Process, timeout time.Duration) bool {
	for until := time.Now().Add(timeout); !p.Ended(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(until) {
			return false
		}
	}
	return true
}

// killTimeout bounds the wait for the end of a killed process.
const killTimeout = 10 * time.Second

// removeAbandoned ends and removes the sandboxes that no one manages any more.
func (c Config) removeAbandoned() error {
	sandboxes, err := os.ReadDir(c.StateDir)
	if err != nil {
		return err
	}
	var ids []string
	for _, sandbox := range sandboxes {
		if id := sandbox.Name(); abi.IsSandboxID(id) {
			ids = append(ids, id)
		}
	}
	return removeAll(ids, c.removeIfAbandoned)
}

// removeTimeout bounds how long a new sandbox waits for the removal of others.
const removeTimeout = 2 * time.Second

// removeAll calls remove for all sandboxes at once. A process that hangs in the kernel does not end when it is killed: its
// removal goes on in the background, and the next sandbox repeats it.
func removeAll(ids []string, remove func(id string) error) error {
	ended, late := sys.All(ids, removeTimeout, remove)
	for _, id := range late {
		ended[id] = fmt.Errorf("not within %v", removeTimeout)
	}
	var errs []error
	for id, err := range ended {
		if err != nil {
			errs = append(errs, fmt.Errorf("the abandoned sandbox %s cannot be removed: %w", id, err))
		}
	}
	return errors.Join(errs...)
}

// removeIfAbandoned removes a sandbox whose shim or bundle is gone, or that has no record: its
// `create` was killed before the supervisor wrote one, or its `delete` was killed.
func (c Config) removeIfAbandoned(id string) error {
	dir := c.sandbox(id)
	r, err := readJSON[record](filepath.Join(dir.records(), id))
	if errors.Is(err, os.ErrNotExist) {
		info, err := os.Stat(string(dir))
		if err != nil || time.Since(info.ModTime()) < c.bootTime()+readyTimeout {
			return nil // it is being created or deleted
		}
		return dir.remove()
	}
	if err != nil {
		return nil // it may be in use
	}
	if _, err := os.Stat(r.Bundle); !errors.Is(err, os.ErrNotExist) && !r.Shim.Ended() {
		return nil
	}
	if dir.end(5*time.Second) == nil {
		return nil // its supervisor lets the guest write its volumes, and bounds the time for it
	}
	if err := kill(r.Process, killTimeout); err != nil {
		return err
	}
	return dir.remove()
}

// end has the supervisor end the sandbox. It fails if the supervisor has ended, or does not answer in time.
func (d sandboxDir) end(timeout time.Duration) error {
	_, err := callWithin(timeout, d, (*supervisor).EndSandbox, new(wire.EndSandboxRequest))
	return err
}

// remove removes the directory of a sandbox whose supervisor has ended.
func (d sandboxDir) remove() error {
	if err := d.share().close(); err != nil {
		return err
	}
	files, err := filepath.Glob(d.records() + "/*")
	if err != nil {
		return err
	}
	for _, file := range files {
		if r, err := readJSON[record](file); err == nil {
			if err := r.removeGroup(); err != nil {
				return err
			}
		}
	}
	// A killed process can leave a record that was not renamed yet, and virtiofsd's socket.
	temporary, err := filepath.Glob(d.file(".*"))
	if err != nil {
		return err
	}
	files = append(files, temporary...)
	return remove(append(files, d.file("fs.sock"), d.controlSocket(), d.volumesSocket(), d.log(), d.records(), string(d))...)
}
