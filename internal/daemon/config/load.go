package config

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	yamlv2 "go.yaml.in/yaml/v2"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

const maxFile = 1 << 20

// Flags are the command line's part of the configuration. A flag that is set overrides the
// file.
type Flags struct {
	set     *pflag.FlagSet
	File    string
	abandon bool // front.abandonVolumes, which the file may set too
}

// fields are the keys that have a flag.
var fields = []struct {
	flag  string
	key   func(*Config) *string
	usage string
}{
	{"run-dir", func(c *Config) *string { return &c.RunDir }, "directory of sockets and state, on tmpfs"},
	{"kubelet-root", func(c *Config) *string { return &c.KubeletRoot }, "directory below which all targets lie"},
	{"runtime-socket", func(c *Config) *string { return &c.RuntimeSocket.Path }, "socket of the Runtime API"},
	{"admin-socket", func(c *Config) *string { return &c.AdminSocket.Path }, "socket of the Admin API"},
	{"containerd-socket", func(c *Config) *string { return &c.Containerd.Socket }, "containerd's socket; empty is off"},
	{"cri-socket", func(c *Config) *string { return &c.CRI.Socket }, "CRI-O's socket, where the container runtime is not containerd"},
	{"kubeconfig", func(c *Config) *string { return &c.Cluster.Kubeconfig }, "how to ask the cluster about this node's pods; empty is off"},
	{"node-name", func(c *Config) *string { return &c.Cluster.NodeName }, "this node's name in the cluster; empty is the host name"},
	{"http-listen", func(c *Config) *string { return &c.HTTP.Listen }, "metrics and health: host:port, unix:/path, or empty for off"},
	{"log-level", func(c *Config) *string { return &c.Log.Level }, "debug, info, warn or error"},
}

// AddFlags defines the flags.
func AddFlags(set *pflag.FlagSet) *Flags {
	f := &Flags{set: set}
	set.StringVar(&f.File, "config", "", "YAML configuration file; what it does not say keeps its default")
	set.BoolVar(&f.abandon, "abandon-volumes", false, "go on although deferred volumes live on this node: also front.abandonVolumes")
	usual := Default()
	for _, field := range fields {
		set.String(field.flag, *field.key(&usual), field.usage)
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
	cfg, err := f.load()
	if err != nil {
		return Config{}, &FileError{File: f.File, Problems: problemsOf(err), cause: err}
	}
	return cfg, nil
}

func (f *Flags) load() (Config, error) {
	cfg := base()
	if f.File != "" {
		raw, err := readFile(f.File)
		if err != nil {
			return Config{}, err
		}
		if cfg, err = parse(raw); err != nil {
			return Config{}, err
		}
	}
	f.apply(&cfg)
	cfg = cfg.complete()
	return cfg, cfg.Validate()
}

func (f *Flags) apply(cfg *Config) {
	cfg.Front.AbandonVolumes = cfg.Front.AbandonVolumes || f.abandon
	for _, field := range fields {
		if flag := f.set.Lookup(field.flag); flag.Changed {
			*field.key(cfg) = flag.Value.String()
		}
	}
}

func readFile(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("the configuration cannot be read: %w", err)
	}
	if !info.Mode().IsRegular() || info.Size() > maxFile {
		return nil, fmt.Errorf("the configuration %s is not a regular file of at most %d bytes", path, maxFile)
	}
	raw, err := os.ReadFile(path) //nolint:gosec // the operator names the file
	if err != nil {
		return nil, fmt.Errorf("the configuration cannot be read: %w", err)
	}
	return raw, nil
}

// Parse reads YAML over the defaults. Unknown and duplicate keys are errors: a misspelt key
// must not silently keep its default.
func Parse(raw []byte) (Config, error) {
	cfg, err := parse(raw)
	if err != nil {
		return Config{}, err
	}
	return cfg.complete(), nil
}

func parse(raw []byte) (Config, error) {
	text, err := toJSON(raw)
	if err != nil {
		return Config{}, err
	}
	cfg := base()
	problems, err := kjson.UnmarshalStrict(text, &cfg)
	if err != nil {
		return Config{}, wrongType(text, err)
	}
	for i, problem := range problems {
		if at, ok := errors.AsType[kjson.FieldError](problem); ok {
			problems[i] = fmt.Errorf("%s: unknown key", at.FieldPath())
		}
	}
	return cfg, errors.Join(append(problems, rulesWithoutDefer(text)...)...)
}

// wrongType describes a value of a wrong type for readers who know YAML and not Go.
func wrongType(text []byte, err error) error {
	wrong, ok := errors.AsType[*json.UnmarshalTypeError](err)
	switch {
	case !ok:
		return err
	case wrong.Field == "":
		return errors.New("the configuration is not a map of keys and values")
	case wrong.Type == reflect.TypeFor[Duration]():
		return fmt.Errorf("%s: %s is not a duration: write one like \"10s\"", wrong.Field, wrong.Value)
	}
	if inRule, is := strings.CutPrefix(wrong.Field, "policy.rules."); is {
		wrong.Field = fmt.Sprintf("policy.rules[%d].%s", firstBadRule(text), inRule)
	}
	words := map[string]string{"array": "a list", "object": "a map of keys and values", "string": "text", "bool": "true or false", "number": "a number"}
	is := cmp.Or(words[wrong.Value], strings.TrimPrefix(wrong.Value, "number ")) // a number may have its digits
	hint := ""
	if wrong.Type.Kind() == reflect.String {
		hint = " (quote text that looks like something else)"
	}
	return fmt.Errorf("%s: %s cannot stand here; it takes %s%s", wrong.Field, is, sys.KindWord(wrong.Type), hint)
}

// firstBadRule is the index of the first rule with a value of a wrong type.
func firstBadRule(text []byte) int {
	var cfg struct {
		Policy struct{ Rules []json.RawMessage }
	}
	if err := json.Unmarshal(text, &cfg); err != nil {
		return 0
	}
	return slices.IndexFunc(cfg.Policy.Rules, func(raw json.RawMessage) bool {
		_, err := kjson.UnmarshalStrict(raw, new(policy.Rule))
		return err != nil
	})
}

// rulesWithoutDefer refuses rules that would silently keep volumes on the host.
func rulesWithoutDefer(text []byte) (found []error) {
	var cfg struct {
		Policy struct {
			Rules []struct {
				Name  string
				Defer *bool
			}
		}
	}
	if err := json.Unmarshal(text, &cfg); err != nil {
		return []error{err}
	}
	for i, rule := range cfg.Policy.Rules {
		if rule.Defer == nil {
			found = append(found, fmt.Errorf("policy.rules[%d] (%q).defer: is missing: say true or false", i, rule.Name))
		}
	}
	return found
}

// toJSON converts one YAML document. A duplicate key is an error.
func toJSON(raw []byte) ([]byte, error) {
	if err := oneDocument(raw); err != nil {
		return nil, err
	}
	text, err := yaml.YAMLToJSONStrict(raw)
	return text, notYAML(err)
}

// notYAML rewrites an error of the YAML library for readers who do not know the library.
func notYAML(err error) error {
	if err == nil {
		return nil
	}
	text := strings.TrimPrefix(err.Error(), "yaml: ")
	text = strings.TrimSpace(strings.TrimPrefix(text, "unmarshal errors:"))
	text = strings.ReplaceAll(text, "already set in map", "is there twice")
	if strings.Contains(text, "cannot start any token") {
		text += " (a tab? indent by spaces)"
	}
	return fmt.Errorf("this is not valid YAML: %s", text)
}

// oneDocument refuses a second document, which would be silently ignored.
func oneDocument(raw []byte) error {
	decoder := yamlv2.NewDecoder(bytes.NewReader(raw))
	var document any
	if err := decoder.Decode(&document); err != nil {
		if errors.Is(err, io.EOF) {
			return nil // an empty file
		}
		return notYAML(err)
	}
	if !errors.Is(decoder.Decode(&document), io.EOF) {
		return errors.New("there is more than one YAML document: remove all from the second --- on")
	}
	return nil
}

// Reloadable returns old with what a running daemon can take over from next, and the keys
// of what needs a restart. A policy that needs a cluster waits for it, and for the restart.
func Reloadable(old, next Config) (applied Config, needRestart []string) {
	applied = old
	applied.Log = next.Log
	applied.Authorization = next.Authorization
	applied.Devices = next.Devices
	applied.Relay = next.Relay
	applied.Policy = next.Policy
	if applied.annotatedNeedsCluster() != nil {
		applied.Policy = old.Policy
	}
	return applied, differences(reflect.ValueOf(applied), reflect.ValueOf(next), "")
}

func differences(a, b reflect.Value, prefix string) []string {
	var keys []string
	for i := range a.NumField() {
		name, _, _ := strings.Cut(a.Type().Field(i).Tag.Get("json"), ",")
		key := prefix + name
		if a.Field(i).Kind() == reflect.Struct {
			keys = append(keys, differences(a.Field(i), b.Field(i), key+".")...)
		} else if !reflect.DeepEqual(a.Field(i).Interface(), b.Field(i).Interface()) {
			keys = append(keys, key)
		}
	}
	return keys
}
