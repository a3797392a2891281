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
	"time"
	"unicode/utf8"

	"go.uber.org/zap"
	"go.yaml.in/yaml/v4"

	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// document is a configuration file that was parsed.
type document struct {
	places   map[string]place // of each key and list item, by its path
	problems []Problem
}

// place is where a key is set; none is a flag.
type place struct{ line, column int }

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
	if _, read := errors.AsType[*yaml.LoadErrors](err); err == nil || read {
		d.check("", top.Content[0], reflect.TypeFor[Config]())
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
	d.addAt(at.line, at.column, key, text)
}

func (d *document) addAt(line, column int, key, text string) {
	d.problems = append(d.problems, Problem{Line: line, Column: column, Key: key, Text: printable(text)})
}

// check adds what is wrong with a value of a type, and with all in it.
func (d *document) check(path string, node *yaml.Node, as reflect.Type) {
	if node.Kind == yaml.AliasNode {
		node = node.Alias
	}
	switch kind := as.Kind(); {
	case kind == reflect.Pointer:
		d.check(path, node, as.Elem())
	case node.ShortTag() == "!!null" && !strings.HasSuffix(path, "]"): // a key without a value is no problem
		delete(d.places, path)
	case node.Kind == yaml.MappingNode && (kind == reflect.Struct || kind == reflect.Map):
		d.checkMap(path, node, as)
	case node.Kind == yaml.SequenceNode && kind == reflect.Slice:
		for i, item := range node.Content {
			at := fmt.Sprintf("%s[%d]", path, i)
			d.places[at] = place{item.Line, item.Column}
			d.check(at, item, as.Elem())
		}
	case path == "":
		d.addAt(node.Line, node.Column, "", "the configuration is not a map of keys and values")
	default:
		d.checkScalar(path, node, as)
	}
}

// maxMerged bounds the maps that are merged into each other.
const maxMerged = 16

var plainKey = regexp.MustCompile(`^[A-Za-z0-9_-]{1,63}$`)

// merge adds the content of a map that is merged. Of several in one map the library would take the last alone.
func (d *document) merge(path string, key *yaml.Node, content, more []*yaml.Node, ok bool) []*yaml.Node {
	if !ok {
		d.addAt(key.Line, key.Column, strings.TrimPrefix(path+".<<", "."), "is there twice: merge one map, by its alias")
		return content
	}
	return slices.Concat(content, more)
}

func (d *document) checkMap(path string, node *yaml.Node, as reflect.Type) {
	names, types := fieldsOf(as)
	lines := map[string]int{}
	content, merged := node.Content, 0
	for i := 0; i+1 < len(content); i += 2 {
		key, value := content[i], content[i+1]
		if from := value.Alias; key.ShortTag() == "!!merge" && from != nil && from.Kind == yaml.MappingNode {
			merged++
			content = d.merge(path, key, content, from.Content, merged == 1 || i >= len(node.Content) && merged < maxMerged)
			continue
		}
		at := strings.TrimPrefix(path+"."+key.Value, ".")
		if as.Kind() == reflect.Map || !plainKey.MatchString(key.Value) {
			at = fmt.Sprintf("%s[%q]", path, sys.Clip(key.Value))
		}
		if lines[key.Value] > 0 {
			if i < len(node.Content) { // else it replaces one that is merged
				d.addAt(key.Line, key.Column, at, fmt.Sprintf("is there twice: the first is in line %d", lines[key.Value]))
			}
			continue
		}
		lines[key.Value] = key.Line
		d.places[at] = place{key.Line, key.Column}
		if as.Kind() == reflect.Map {
			d.check(at, value, as.Elem())
		} else if field := slices.Index(names, key.Value); field >= 0 {
			d.check(at, value, types[field])
		} else {
			d.add(at, "unknown key; "+suggest(key.Value, names))
		}
	}
	if _, set := d.places[path+".defer"]; !set && as == reflect.TypeFor[policy.Rule]() { // it would silently keep volumes on the host
		var rule policy.Rule
		_ = node.Load(&rule) // its errors are reported already
		d.add(fmt.Sprintf("%s (%q).defer", path, sys.Clip(rule.Name)), "is missing: say true or false")
	}
}

// checkScalar is stricter than the library, which takes every scalar as text.
func (d *document) checkScalar(path string, node *yaml.Node, as reflect.Type) {
	tag, hint := node.ShortTag(), ""
	isNumber := tag == "!!int" || tag == "!!float"
	fits := node.Kind == yaml.ScalarNode && tag != "!!null" && node.Load(reflect.New(as).Interface()) == nil
	if as.Kind() == reflect.String {
		fits = fits && !isNumber && tag != "!!bool"
		hint = " (quote text that looks like something else)"
	}
	words := map[string]string{"!!seq": "a list", "!!map": "a map of keys and values", "!!bool": "true or false", "!!null": "an empty value"}
	is := cmp.Or(words[tag], "text")
	if isNumber {
		is = "the number " + node.Value
	}
	switch {
	case fits:
	case as == reflect.TypeFor[time.Duration]():
		d.add(path, cmp.Or(node.Value, is)+` is not a duration: write one like "10s"`)
	default:
		d.add(path, fmt.Sprintf("%s cannot stand here; it takes %s%s", is, sys.KindWord(as), hint))
	}
}

// fieldsOf returns the keys of a part of the configuration, and the types of their values.
func fieldsOf(as reflect.Type) (names []string, types []reflect.Type) {
	for i := 0; as.Kind() == reflect.Struct && i < as.NumField(); i++ {
		names = append(names, keyOf(as.Field(i)))
		types = append(types, as.Field(i).Type)
	}
	return names, types
}

func keyOf(field reflect.StructField) string {
	name, _, _ := strings.Cut(field.Tag.Get("yaml"), ",")
	return name
}

// suggest names the key that was meant, or else those that there are.
func suggest(key string, names []string) string {
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

// Problem is one thing that is wrong with a configuration.
type Problem struct {
	// Line and Column count from 1. They are 0 if the value comes from a flag or is a default.
	Line, Column int
	// Key is the path of the key, such as policy.rules[0] ("name").handler; empty is the whole file.
	Key string
	// Text is one line of printable characters.
	Text string
}

// FileError is all that is wrong with a configuration, in the order of the file.
type FileError struct {
	File     string // empty if there is none, only flags
	Problems []Problem
	cause    error
}

// Error returns one line for each problem: file:line:column: key: what is wrong.
func (e *FileError) Error() string {
	lines := make([]string, 0, len(e.Problems))
	for _, p := range e.Problems {
		where := printable(e.File)
		if p.Line > 0 {
			where = fmt.Sprintf("%s:%d:%d", where, p.Line, p.Column)
		}
		parts := slices.DeleteFunc([]string{where, p.Key, p.Text}, func(part string) bool { return part == "" })
		lines = append(lines, strings.Join(parts, ": "))
	}
	return strings.Join(lines, "\n")
}

// Unwrap returns why the file cannot be read, if that is the problem.
func (e *FileError) Unwrap() error { return e.cause }

// maxText bounds the description of a problem.
const maxText = 2048

// mostLogged bounds the records of one bad file.
const mostLogged = 20

// Log writes one record for each problem, and one with the number of those beyond the first 20.
func (e *FileError) Log(log *zap.Logger, message string) {
	for i, p := range e.Problems {
		if i == mostLogged {
			log.Error(message, zap.String("file", e.File), zap.String("problem", fmt.Sprintf("and %d more", len(e.Problems)-i)))
			return
		}
		log.Error(message, zap.String("file", e.File), zap.Int("line", p.Line), zap.Int("column", p.Column),
			zap.String("key", p.Key), zap.String("problem", p.Text))
	}
}

// err returns the problems in the order of the file, those without a line last; nil is none.
func (d *document) err(file string) error {
	if len(d.problems) == 0 {
		return nil
	}
	slices.SortStableFunc(d.problems, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(uint(a.Line-1), uint(b.Line-1)), a.Column-b.Column)
	})
	return &FileError{File: file, Problems: d.problems}
}

// keyForm is how an error of Validate begins: the key's path, with a rule's name behind its index.
var keyForm = regexp.MustCompile(`^(\w[\w.]*(?:\[(?:\d+|"(?:[^"\\]|\\.)*")\](?: \("(?:[^"\\]|\\.)*"\))?[\w.]*)*): (.*)$`)

func problemsOf(err error) []Problem {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		var all []Problem
		for _, one := range joined.Unwrap() {
			all = append(all, problemsOf(one)...)
		}
		return all
	}
	text := printable(err.Error())
	if parts := keyForm.FindStringSubmatch(text); parts != nil {
		return []Problem{{Key: parts[1], Text: parts[2]}}
	}
	return []Problem{{Text: text}}
}

// printable replaces what may not reach a terminal or a log (controls, line ends, hidden characters),
// and bounds the text.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if !sys.IsPrintable(r) {
			return '\uFFFD'
		}
		return r
	}, sys.ClipTo(text, maxText))
}
