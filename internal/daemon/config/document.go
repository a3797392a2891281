package config

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v4"

	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// document is a configuration file that was parsed.
type document struct {
	places   map[string]place // of each key and list item, by its path
	problems []Problem
}

// place is where a key is set: in the file, or by a flag.
type place struct {
	line, column int
	flag         string
}

// readDocument reads YAML over cfg. Unknown and duplicate keys are problems: a misspelt key must
// not silently keep its default.
func readDocument(raw []byte, cfg *Config) *document {
	d := &document{places: map[string]place{}}
	var top, second yaml.Node
	loader, err := yaml.NewLoader(bytes.NewReader(raw))
	if err == nil {
		err = loader.Load(&top)
	}
	if errors.Is(err, io.EOF) {
		return d // an empty file
	}
	if err == nil {
		err = loader.Load(&second)
	}
	if err == nil { // the second would be silently ignored
		d.addAt(second.Line, second.Column, "", "there is more than one YAML document: remove all from the second --- on")
	} else if !errors.Is(err, io.EOF) {
		d.notYAML(raw, err)
		return d
	}
	// The library goes first, because it bounds how far aliases expand. check finds duplicate keys.
	err = top.Load(cfg, yaml.WithKnownFields(), yaml.WithUniqueKeys(false))
	var all *yaml.LoadErrors
	if err == nil || errors.As(err, &all) {
		d.check("", resolved(&top), reflect.TypeFor[Config]())
	}
	if err != nil && len(d.problems) == 0 {
		d.notYAML(raw, err)
	}
	return d
}

// notYAML adds an error of the YAML library, for readers who do not know the library.
func (d *document) notYAML(raw []byte, err error) {
	one := &yaml.LoadError{Message: err.Error()}
	_ = errors.As(err, &one)
	at, text := one.Mark, "this is not valid YAML: "+one.Message
	if at.Line == 0 && at.Index < len(raw) { // a character that YAML does not allow
		before := raw[:at.Index]
		at.Line, at.Column = 1+bytes.Count(before, []byte("\n")), utf8.RuneCount(before[1+bytes.LastIndexByte(before, '\n'):])+1
	}
	if strings.Contains(text, "cannot start any token") {
		text += " (a tab? indent by spaces)"
	}
	if begin := one.ContextMark.Line; begin > 0 && begin != at.Line {
		text += fmt.Sprintf(" (%s that begins in line %d)", one.ContextMsg, begin)
	}
	d.addAt(at.Line, at.Column, "", text)
}

// judge adds what Validate found, unless it is about what could not be read.
func (d *document) judge(err error) {
	unread := d.problems
	for _, p := range problemsOf(err) {
		if !slices.ContainsFunc(unread, func(u Problem) bool { return related(u.Key, p.Key) }) {
			d.add(p.Key, p.Text)
		}
	}
}

// related reports whether one key lies in the other, or both lie in one list.
func related(a, b string) bool {
	a, _, _ = strings.Cut(a, "[")
	b, _, _ = strings.Cut(b, "[")
	return strings.HasPrefix(a+".", b+".") || strings.HasPrefix(b+".", a+".")
}

// ruleName stands behind the index of a rule in the key of a problem.
var ruleName = regexp.MustCompile(` \("(?:[^"\\]|\\.)*"\)`)

// add adds a problem at the place of the key, or of the nearest key above it that is set.
func (d *document) add(key, text string) {
	path := ruleName.ReplaceAllString(key, "")
	at, set := d.places[path]
	for ; !set && path != ""; at, set = d.places[path] {
		path = path[:max(0, strings.LastIndexAny(path, ".["))]
	}
	if at.flag != "" {
		text += " (set by --" + at.flag + ")"
	}
	d.addAt(at.line, at.column, key, text)
}

func (d *document) addAt(line, column int, key, text string) {
	d.problems = append(d.problems, Problem{Line: line, Column: column, Key: key, Text: printable(text)})
}

// check adds what is wrong with a value of a type, and with all in it.
func (d *document) check(path string, node *yaml.Node, as reflect.Type) {
	item := strings.HasSuffix(path, "]")
	switch kind := as.Kind(); {
	case kind == reflect.Pointer:
		d.check(path, node, as.Elem())
	case node.ShortTag() == "!!null" && !item: // a key without a value keeps its default
		delete(d.places, path)
	case node.Kind == yaml.MappingNode && (kind == reflect.Struct || kind == reflect.Map):
		d.checkMap(path, node, as)
		if _, set := d.places[path+".defer"]; !set && as == reflect.TypeFor[policy.Rule]() { // it would silently keep volumes on the host
			var rule policy.Rule
			_ = node.Load(&rule) // its errors are reported already
			d.add(fmt.Sprintf("%s (%q).defer", path, sys.Clip(rule.Name)), "is missing: say true or false")
		}
	case node.Kind == yaml.SequenceNode && kind == reflect.Slice:
		for i, item := range node.Content {
			at := fmt.Sprintf("%s[%d]", path, i)
			d.places[at] = place{line: item.Line, column: item.Column}
			d.check(at, resolved(item), as.Elem())
		}
	case path == "":
		d.addAt(node.Line, node.Column, "", "the configuration is not a map of keys and values")
	case as == reflect.TypeFor[Duration]():
		if node.Load(new(Duration)) != nil {
			d.add(path, fmt.Sprintf("%s is not a duration: write one like \"10s\"", cmp.Or(node.Value, "this")))
		}
	default:
		d.checkScalar(path, node, as)
	}
}

func (d *document) checkMap(path string, node *yaml.Node, as reflect.Type) {
	lines := map[string]int{}
	for i := 0; i+1 < len(node.Content); i += 2 {
		key, value := node.Content[i], resolved(node.Content[i+1])
		if key.ShortTag() == "!!merge" {
			d.merge(path, value, as)
			continue
		}
		at := pathOf(path, key.Value)
		if lines[key.Value] > 0 {
			d.addAt(key.Line, key.Column, at, fmt.Sprintf("is there twice: the first is in line %d", lines[key.Value]))
			continue
		}
		lines[key.Value] = key.Line
		d.places[at] = place{line: key.Line, column: key.Column}
		if of := typeOf(as, key.Value); of != nil {
			d.check(at, value, of)
		} else {
			d.add(at, "unknown key; "+suggest(key.Value, as))
		}
	}
}

// merge checks what << merges into a map: one map, or a list of them.
func (d *document) merge(path string, value *yaml.Node, as reflect.Type) {
	from := []*yaml.Node{value}
	if value.Kind == yaml.SequenceNode {
		from = value.Content
	}
	for _, one := range from {
		d.checkMap(path, resolved(one), as)
	}
}

// checkScalar is stricter than the library, which takes every scalar as text.
func (d *document) checkScalar(path string, node *yaml.Node, as reflect.Type) {
	kind, tag, hint := as.Kind(), node.ShortTag(), ""
	isNumber := tag == "!!int" || tag == "!!float"
	fits := node.Kind == yaml.ScalarNode && tag != "!!null" && node.Load(reflect.New(as).Interface()) == nil
	if kind == reflect.String {
		fits = fits && !isNumber && tag != "!!bool"
		hint = " (quote text that looks like something else)"
	}
	if fits {
		return
	}
	is := map[string]string{"!!seq": "a list", "!!map": "a map of keys and values", "!!bool": "true or false", "!!null": "an empty value"}[tag]
	if isNumber {
		is = "a number"
	}
	if isNumber && kind >= reflect.Int && kind <= reflect.Float64 {
		is = node.Value
	}
	d.add(path, fmt.Sprintf("%s cannot stand here; it takes %s%s", cmp.Or(is, "text"), sys.KindWord(as), hint))
}

// resolved follows an alias, and enters a document.
func resolved(node *yaml.Node) *yaml.Node {
	switch node.Kind {
	case yaml.AliasNode:
		return node.Alias
	case yaml.DocumentNode:
		return node.Content[0]
	}
	return node
}

var plainKey = regexp.MustCompile(`^[A-Za-z0-9_-]{1,63}$`)

func pathOf(parent, key string) string {
	switch {
	case parent == "policy.runtimes" || !plainKey.MatchString(key):
		return fmt.Sprintf("%s[%q]", parent, sys.Clip(key))
	case parent == "":
		return key
	}
	return parent + "." + key
}

// keyOf is the key of a field of the configuration.
func keyOf(field reflect.StructField) string {
	name, _, _ := strings.Cut(field.Tag.Get("yaml"), ",")
	return name
}

// typeOf is the type of a key's value; nil is an unknown key.
func typeOf(as reflect.Type, key string) reflect.Type {
	if as.Kind() == reflect.Map {
		return as.Elem()
	}
	for field := range as.Fields() {
		if keyOf(field) == key {
			return field.Type
		}
	}
	return nil
}

// suggest names the key that was meant, or else those that there are.
func suggest(key string, as reflect.Type) string {
	var names []string
	for field := range as.Fields() {
		names = append(names, keyOf(field))
	}
	key = strings.ToLower(sys.ClipTo(key, 64))
	how := func(name string) int { return distance(key, strings.ToLower(name)) }
	if near := slices.MinFunc(names, func(a, b string) int { return how(a) - how(b) }); how(near) <= max(2, len(key)/4) {
		return "did you mean " + near + "?"
	}
	return "the keys here are " + strings.Join(names, ", ")
}

// distance is how many letters must be put in, taken out or replaced to make b from a.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := i
		row[0] = i + 1
		for j := range len(b) {
			if a[i] != b[j] {
				diagonal++
			}
			diagonal, row[j+1] = row[j+1], min(row[j]+1, row[j+1]+1, diagonal)
		}
	}
	return row[len(b)]
}
