package config

import (
	"context"
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"time"

	"github.com/spf13/pflag"

	"github.com/crust-proxy/crust-proxy/internal/front/policy"
)

const maxFile = 1 << 20

// Flags are the command line's part of the configuration. A flag that is set overrides the file.
type Flags struct {
	set  *pflag.FlagSet
	File string
	// Raw is the file as Load read it last: nil if it could not be read.
	Raw []byte
	// Accepted is where the daemon keeps the file that it accepted last; empty is nowhere.
	Accepted string
	// Abandon is the flag alone. Load sets front.abandonVolumes by it, which the file may set too.
	Abandon bool
}

// fields are the keys that have a flag.
var fields = []struct {
	flag, key string
	value     func(*Config) *string
	usage     string
}{
	{"run-dir", "runDir", func(c *Config) *string { return &c.RunDir }, "directory of sockets and state, on tmpfs"},
	{"kubelet-root", "kubeletRoot", func(c *Config) *string { return &c.KubeletRoot }, "directory below which all targets lie"},
	{"runtime-socket", "runtimeSocket.path", func(c *Config) *string { return &c.RuntimeSocket.Path }, "socket of the Runtime API"},
	{"admin-socket", "adminSocket.path", func(c *Config) *string { return &c.AdminSocket.Path }, "socket of the Admin API"},
	{"containerd-socket", "containerd.socket", func(c *Config) *string { return &c.Containerd.Socket }, "containerd's socket; empty is off"},
	{"cri-socket", "cri.socket", func(c *Config) *string { return &c.CRI.Socket }, "CRI-O's socket, where the container runtime is not containerd"},
	{"kubeconfig", "cluster.kubeconfig", func(c *Config) *string { return &c.Cluster.Kubeconfig }, "how to ask the cluster about this node's pods; empty is off"},
	{"node-name", "cluster.nodeName", func(c *Config) *string { return &c.Cluster.NodeName }, "this node's name in the cluster; empty is the host name"},
	{"http-listen", "http.listen", func(c *Config) *string { return &c.HTTP.Listen }, "metrics and health: host:port, unix:/path, or empty for off"},
	{"log-level", "log.level", func(c *Config) *string { return &c.Log.Level }, "debug, info, warn or error"},
}

// AddFlags defines the flags.
func AddFlags(set *pflag.FlagSet) *Flags {
	f := &Flags{set: set}
	set.StringVar(&f.File, "config", "", "YAML configuration file; what it does not say keeps its default")
	set.StringVar(&f.Accepted, "accepted", "", "where the daemon keeps a copy of the file that it accepted last, to start with it if the file is bad; "+
		"on a disk; empty is nowhere")
	set.BoolVar(&f.Abandon, "abandon-volumes", false, "go on although deferred volumes live on this node; for a start, the same as front.abandonVolumes")
	usual := Default()
	for _, field := range fields {
		set.String(field.flag, *field.value(&usual), field.usage)
	}
	return f
}

// Source describes where the configuration comes from.
func (f *Flags) Source() string {
	if f.File == "" {
		return "the defaults and flags alone: no --config is given; the service reads /etc/crust-proxy/config.yaml"
	}
	return f.File + ", with the defaults and flags"
}

// Load returns the validated configuration from file and flags. Its error is a *FileError.
func (f *Flags) Load() (Config, error) {
	cfg, doc := base(), &document{places: map[string]place{}}
	if f.File != "" {
		var err error
		if f.Raw, err = readFile(f.File); err != nil {
			return Config{}, &FileError{File: f.File, Problems: problemsOf(err), cause: err}
		}
		doc = readDocument(f.Raw, &cfg)
	}
	f.apply(&cfg, doc.places)
	if err := errors.Join(absolute("runDir", cfg.RunDir), absolute("kubeletRoot", cfg.KubeletRoot)); err != nil {
		doc.judge(err)
		cfg.RunDir, cfg.KubeletRoot = base().RunDir, base().KubeletRoot // no errors about the defaults below them
	}
	cfg = cfg.complete()
	if err := cfg.Validate(); err != nil {
		doc.judge(err)
	}
	return cfg, doc.err(f.File)
}

// LoadAccepted is Load for the file that was accepted last, which is also returned. Without --accepted there are the
// defaults.
func (f *Flags) LoadAccepted() (cfg Config, raw []byte, err error) {
	other := *f
	other.File, other.Raw = f.Accepted, nil
	cfg, err = other.Load()
	return cfg, other.Raw, err
}

// apply sets what is set by flags, which has no place in the file.
func (f *Flags) apply(cfg *Config, places map[string]place) {
	cfg.Front.AbandonVolumes = cfg.Front.AbandonVolumes || f.Abandon
	for _, field := range fields {
		if flag := f.set.Lookup(field.flag); flag.Changed {
			*field.value(cfg) = flag.Value.String()
			places[field.key] = place{}
		}
	}
}

func readFile(path string) ([]byte, error) {
	if info, err := os.Stat(path); err == nil && (!info.Mode().IsRegular() || info.Size() > maxFile) {
		return nil, fmt.Errorf("the configuration is not a regular file of at most %d bytes", maxFile)
	}
	raw, err := os.ReadFile(path) //nolint:gosec // the operator names the file
	if err != nil {
		return nil, fmt.Errorf("the configuration cannot be read: %w", err)
	}
	return raw, nil
}

// Parse reads YAML over the defaults. The result is not validated.
func Parse(raw []byte) (Config, error) {
	cfg := base()
	doc := readDocument(raw, &cfg)
	return cfg.complete(), doc.err("")
}

// Reloadable returns old with what a running daemon can take over from next, and the keys
// of what needs a restart. What refers to something that needs one waits with it: the rules for
// handlers, the front and a cluster, and the devices for the directory of private paths.
func Reloadable(old, next Config) (applied Config, needRestart []string) {
	applied = old
	applied.Log = next.Log
	applied.Containerd.Namespace = next.Containerd.Namespace // which has no effect
	applied.Authorization = next.Authorization
	applied.Relay = next.Relay
	if old.Front.PrivateDir == next.Front.PrivateDir {
		applied.Devices = next.Devices
	}
	applied.Policy = next.Policy
	byPod := func(r policy.Rule) bool { return len(r.ByPod()) > 0 }
	noPods := !old.Cluster.On() && next.Cluster.On() && slices.ContainsFunc(next.Policy.Rules, byPod)
	sameHandlers := old.Handlers.Default == next.Handlers.Default && slices.Equal(old.Handlers.names(), next.Handlers.names())
	leaves := old.Front.Enabled && !next.Front.Enabled
	if leaves || noPods || !sameHandlers || applied.Validate() != nil {
		applied.Policy = old.Policy
	}
	return applied, differences(reflect.ValueOf(applied), reflect.ValueOf(next), "")
}

func differences(a, b reflect.Value, prefix string) (keys []string) {
	for i := range a.NumField() {
		key := prefix + keyOf(a.Type().Field(i))
		if a.Field(i).Kind() == reflect.Struct {
			keys = append(keys, differences(a.Field(i), b.Field(i), key+".")...)
		} else if !reflect.DeepEqual(a.Field(i).Interface(), b.Field(i).Interface()) {
			keys = append(keys, key)
		}
	}
	return keys
}

const (
	// watchEvery is how often the file is compared with what it was. This sees also what raises no event of
	// inotify: a new directory under the old name, the target of a link to another one. Each look costs a dozen
	// wake-ups of Go's scheduler.
	watchEvery = 20 * time.Second
	// quiet is for how long a changed file has to stay as it is before it is read.
	quiet = 2 * time.Second
)

// mostChanging is for how many looks in a row a file may change before it is read nevertheless.
const mostChanging = 5

// Watcher reports changes of the configuration file, also where it is replaced by a rename or
// is a link into a ConfigMap that is swapped.
type Watcher struct {
	file string
	seen os.FileInfo // the file's state at the last change that was reported; nil is no file
}

// stateOf returns what tells one state of a file from another; nil is no file.
func stateOf(file string) os.FileInfo {
	info, err := os.Stat(file)
	if err != nil {
		return nil
	}
	return info
}

func sameState(a, b os.FileInfo) bool {
	if a == nil || b == nil {
		return a == b
	}
	return os.SameFile(a, b) && a.ModTime().Equal(b.ModTime()) && a.Size() == b.Size()
}

// Watch begins to watch. A caller that reads the file after that misses no change of it. No file ("") never changes.
func Watch(file string) *Watcher { return &Watcher{file: file, seen: stateOf(file)} }

// Run calls changed for each change since Watch, and for each signal, until ctx ends. A change
// is reported when the file has been quiet for some time, because editors and Kubernetes
// change one in several steps, or does not become quiet.
func (w *Watcher) Run(ctx context.Context, signals <-chan os.Signal, changed func()) error {
	before, changing := w.seen, 0
	for {
		wait := watchEvery
		if changing > 0 {
			wait = quiet
		}
		select {
		case <-ctx.Done():
			return nil
		case <-signals:
			w.seen = stateOf(w.file)
			changed()
			continue
		case <-time.After(wait):
		}
		now := stateOf(w.file)
		if changing++; sameState(now, w.seen) {
			changing = 0
		} else if sameState(now, before) || changing > mostChanging {
			w.seen, changing = now, 0
			changed()
		}
		before = now
	}
}
