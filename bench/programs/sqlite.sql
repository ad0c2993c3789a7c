-- Work in memory: rows, indexes, joins, groups and strings.
create table person(id integer primary key, name text, city integer, age integer, note text);
create table city(id integer primary key, name text, region integer);
with recursive n(i) as (select 1 union all select i + 1 from n where i < 500)
insert into city select i, 'city ' || (i * 7919 % 1000), i % 17 from n;
with recursive n(i) as (select 1 union all select i + 1 from n where i < 150000)
insert into person select i, 'name ' || (i * 104729 % 99991), 1 + i * 31 % 500, 18 + i * 13 % 70,
  substr('a note of some length that differs from row to row, more or less', 1, 10 + i % 50) from n;
create index person_name on person(name);
create index person_city on person(city, age);
select c.region, count(*), avg(p.age), max(p.name) from person p join city c on c.id = p.city group by c.region order by c.region;
update person set note = note || ' changed' where id % 3 = 0;
delete from person where id % 5 = 0;
select count(distinct name), sum(length(note)) from person;
select p.name, group_concat(q.id) from person p join person q on q.name = p.name
  where p.id % 1000 = 1 group by p.name order by p.name limit 20;
select name, row_number() over (partition by city order by age, id) as place from person order by place desc, name limit 10;
create table copy as select * from person order by name desc, id;
select sum(id * 1.0 / age) > 0, count(*) from copy;
drop table person;
select count(*), min(name), max(note) from copy;
